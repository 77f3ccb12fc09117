"""LlamaCppBackend: advances all sequences by one call of llama_decode a step, each in a slot with its own KV stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from slimproc.engines.backend import Event, Produced, Scored, SequenceFailed
from slimproc.engines.grammar.matcher import GrammarError
from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.engines.llama_cpp.batch import Chunk, plan_batch
from slimproc.engines.llama_cpp.embedder import Embedder
from slimproc.engines.llama_cpp.library import lib, native_log
from slimproc.engines.llama_cpp.model import BATCH, LoadedModel
from slimproc.engines.llama_cpp.native_batch import NativeBatch
from slimproc.engines.llama_cpp.prompt_scores import SCORED_ROWS, PromptScorer
from slimproc.engines.llama_cpp.sampling import NoChoiceError, Sampler, greedy
from slimproc.engines.llama_cpp.slots import SlotView, choose_slot
from slimproc.engines.logprobs import score
from slimproc.engines.pooled import PooledSequence
from slimproc.engines.prefill import PrefillBudget
from slimproc.engines.sequence import Sequence
from slimproc.errors import InvalidRequest
from slimproc.ipc.wire import ModelInfo
from slimproc.settings import EngineSettings

_RECOVERABLE = {1, 2, -1}
"""What llama_decode says of a batch that it refused or broke off with its state intact; anything else is fatal."""


class Slot:
    """Room for one sequence. ``tokens[:past]`` are in its KV stream, exactly those; the rest waits for evaluation."""

    __slots__ = ("index", "past", "sampler", "scorer", "sequence", "tokens", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.sequence: Sequence | None = None
        self.sampler: Sampler | None = None
        self.scorer: PromptScorer | None = None
        """While the prompt's own log probabilities are still being gathered."""
        self.tokens: list[int] = []
        self.past = 0
        self.used = 0


class LlamaCppBackend:
    """The ``Backend`` over llama.cpp. A slot keeps its tokens when its sequence ends, for a prompt that begins alike."""

    poll_interval: float | None = None
    gives_logprobs = gives_prompt_logprobs = True

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._model: LoadedModel

    def load(self, progress: Callable[[float], None]) -> ModelInfo:
        """Raises LoadFailed. Once only; ``close`` undoes it."""
        model = self._model = LoadedModel(self._settings, progress)
        self._vocabulary = model.vocabulary
        self._context, self._memory = model.context, model.memory
        self._embedder = Embedder(model) if model.pooling is not None else None
        self._batch = NativeBatch(BATCH)
        self._slots = [Slot(index) for index in range(model.slots)]
        self._active: dict[int, Slot] = {}
        """By rid, oldest first."""
        self._budget = PrefillBudget(BATCH)
        self._uses = 0
        return model.info()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocabulary.tokenize(text, add_bos=add_special, parse_special=parse_special)

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        return self._vocabulary.tokenize_spans(text, literals)

    def tokenize_input(self, text: str, *, query: str | None) -> list[int]:
        if query is None:
            return self._vocabulary.tokenize_input(text)
        return self._vocabulary.tokenize_pair(query, text, self._model.rank_template)

    def detokenize(self, tokens: list[int]) -> bytes:
        return self._vocabulary.detokenize(tokens)

    def grammar_vocabulary(self) -> GrammarVocabulary:
        return self._vocabulary.grammar_vocabulary()

    def close(self) -> None:
        """Free the model and all that belongs to it. No other method may be called afterwards."""
        if hasattr(self, "_model"):
            self._model.close()

    # --- joining and leaving ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary, in the prompt or in ``logit_bias``."""
        if self._embedder is not None:
            assert isinstance(sequence, PooledSequence), "the front asks this model for vectors only"
            self._embedder.add(sequence)
            return
        prompt = sequence.prompt
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self._vocabulary.check(prompt, param="prompt")
        sampler = Sampler(sequence.sampling, prompt, self._vocabulary.size, self._vocabulary.end_ids, sequence.grammar)
        assert len(prompt) < self._model.context_tokens, "the caller refuses prompts that leave no room"
        views = [SlotView(slot.sequence is not None, slot.tokens[: slot.past], slot.used) for slot in self._slots]
        # A prompt whose own tokens are scored must be evaluated whole: one token shares nothing with any slot.
        known = prompt[:1] if sequence.scores_prompt else prompt
        choice = choose_slot(known, views, rewinds=self._model.rewinds)
        slot = self._slots[choice.slot]
        if choice.copy_from is not None:
            # Only whole: with a stream for each slot, llama.cpp aborts the process on a copy of a part.
            lib.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
            lib.llama_memory_seq_cp(self._memory, choice.copy_from, slot.index, -1, -1)
        slot.tokens = list(prompt)
        slot.past = choice.cached
        self._rewind(slot)
        slot.sequence, slot.sampler = sequence, sampler
        slot.scorer = PromptScorer(sequence, self._vocabulary) if sequence.scores_prompt else None
        sequence.cached_tokens = slot.past
        self._active[sequence.rid] = slot

    def remove(self, sequence: Sequence) -> None:
        """What the slot holds stays for later; a sequence that is not here any more is no error."""
        if self._embedder is not None:
            self._embedder.remove(sequence)
            return
        slot = self._active.pop(sequence.rid, None)
        if slot is None:
            return
        self._uses += 1
        slot.used = self._uses
        slot.sequence = slot.sampler = slot.scorer = None

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> Iterable[Event]:
        """One call of the model. A batch that llama.cpp refuses costs the newest sequence and changes no other.

        Raises RuntimeError when the context is broken: the engine cannot go on.
        """
        if self._embedder is not None:
            return self._embedder.step()
        waiting = [(slot.index, self._due(slot)) for slot in self._active.values()]
        if not waiting:
            return []
        running = sum(tokens == 1 for _, tokens in waiting)
        chunks = plan_batch(waiting, budget=self._budget.tokens(running), room=BATCH, can_fill=self._can_fill)
        asked = self._fill(chunks)
        began = time.monotonic()
        code = self._batch.decode(self._context)
        if code != 0:
            return self._refused(code)
        prompt_tokens = sum(chunk.tokens for chunk in chunks if not chunk.filler) - running
        self._budget.observe(running, prompt_tokens, time.monotonic() - began)
        for index, count, filler in chunks:
            slot = self._slots[index]
            if filler:
                self._rewind(slot)
            else:
                slot.past += count
        return self._produce(asked) if asked else []

    def _due(self, slot: Slot) -> int:
        """How many of its tokens may be evaluated in this step."""
        due = len(slot.tokens) - slot.past
        if slot.scorer is None:
            return due
        scorers = sum(other.scorer is not None for other in self._active.values())
        return min(due, max(SCORED_ROWS // scorers, 1))

    def _fill(self, chunks: list[Chunk]) -> list[tuple[Slot, int]]:
        """Write the batch. Returns the slots whose logits the call will give, and how many rows, in their order."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        outputs: list[int] = []
        asked = []
        for index, count, filler in chunks:
            slot = self._slots[index]
            past = slot.past
            # A filler's token is any that exists; nobody reads what comes of it.
            tokens += slot.tokens[past : past + count] if not filler else (0,)
            positions += range(past, past + count)
            sequences += (index,) * count
            outputs += (0,) * count
            if filler:
                continue
            if slot.scorer is not None:
                outputs[-count:] = (1,) * count
                asked.append((slot, count))
            elif past + count == len(slot.tokens):
                outputs[-1] = 1
                asked.append((slot, 1))
        self._batch.fill(tokens, positions, sequences, outputs)
        return asked

    def _produce(self, asked: list[tuple[Slot, int]]) -> list[Event]:
        rows = self._batch.logits(self._context, sum(count for _, count in asked), self._vocabulary.size)
        events: list[Event] = []
        ends, piece = self._vocabulary.ends, self._vocabulary.piece
        done = 0
        for slot, count in asked:
            sequence, sampler = slot.sequence, slot.sampler
            assert sequence is not None
            assert sampler is not None
            done += count
            if slot.scorer is not None:
                part = slot.scorer.take(rows[done - count : done])
                events.append(part)
                if not part.last or not sequence.limit:
                    continue
                slot.scorer = None
            row = rows[done - 1]
            try:
                token = greedy(row) if sampler.plain_greedy else sampler.choose(row)
                end = token in ends
                text = b"" if end else piece(token)
                if sequence.grammar is not None and not end:
                    sequence.grammar.accept(token)
                    end = sequence.grammar.stopped
            except GrammarError as error:
                events.append(SequenceFailed(sequence, f"the grammar cannot be followed any further: {error}"))
                continue
            except NoChoiceError:
                events.append(
                    SequenceFailed(sequence, "the model gave no token that can be chosen (NaN or all barred)")
                )
                continue
            sampler.accept(token)
            slot.tokens.append(token)
            if sequence.logprobs is None:
                events.append(Produced(sequence, text, end))
            else:  # of the logits as they are: what the sampler made of them is its own copy
                its = score(row, token, text, sequence.logprobs, self._vocabulary.spelled)
                events.append(Scored(sequence, its, end))
        return events

    def _refused(self, code: int) -> list[Event]:
        if code not in _RECOVERABLE:
            raise RuntimeError(f"llama_decode failed with {code}: {native_log.cause('no reason given')}")
        for slot in self._slots:
            self._rewind(slot)
        newest = next(reversed(self._active.values())).sequence
        assert newest is not None
        return [SequenceFailed(newest, f"llama.cpp refused the batch (code {code})")]

    def _can_fill(self, index: int) -> bool:
        slot = self._slots[index]
        return self._model.rewinds and slot.sequence is None and slot.past < self._model.context_tokens

    def _rewind(self, slot: Slot) -> None:
        """Make the KV stream hold what ``past`` says and no more; nothing at all where it cannot be cut."""
        if not lib.llama_memory_seq_rm(self._memory, slot.index, slot.past, -1):
            lib.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
            slot.past = 0
