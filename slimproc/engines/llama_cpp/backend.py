"""LlamaCppBackend: advances all sequences by one call of llama_decode a step, each in a slot with its own KV stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from slimproc.engines.backend import Event, SequenceFailed
from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.engines.llama_cpp.batch import WORTH_A_CALL, Chunk, plan_answers, plan_prompts
from slimproc.engines.llama_cpp.cells import Cells
from slimproc.engines.llama_cpp.embedder import Embedder
from slimproc.engines.llama_cpp.library import lib, native_log
from slimproc.engines.llama_cpp.lookup import PromptLookup
from slimproc.engines.llama_cpp.model import BATCH, LoadedModel
from slimproc.engines.llama_cpp.native_batch import NativeBatch
from slimproc.engines.llama_cpp.sampling import Sampler
from slimproc.engines.llama_cpp.slot import Slot
from slimproc.engines.llama_cpp.slots import choose_slot
from slimproc.engines.llama_cpp.speculation import guess_ahead
from slimproc.engines.pooled import PooledSequence
from slimproc.engines.prefill import PrefillBudget
from slimproc.engines.prompt_scores import SCORED_ROWS, PromptScorer
from slimproc.engines.sequence import Sequence
from slimproc.errors import InvalidRequest
from slimproc.ipc.wire import ModelInfo
from slimproc.settings import EngineSettings

_RECOVERABLE = {1, 2, -1}
"""What llama_decode says of a batch that it refused or broke off with its state intact; anything else is fatal."""


class LlamaCppBackend:
    """The ``Backend`` over llama.cpp. A slot keeps its tokens when its sequence ends, for a prompt that begins alike."""

    poll_interval: float | None = None
    gives_logprobs = gives_prompt_logprobs = True
    uses_gpu = bool(lib.llama_supports_gpu_offload())

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
        self._cells = Cells(model.memory, self._slots, streams=model.rewinds)
        self._active: dict[int, Slot] = {}
        """By rid, oldest first."""
        self._budget = PrefillBudget(BATCH, least=WORTH_A_CALL)
        self._filler: int | None = None
        """A token whose values are known to be numbers."""
        self._uses = 0
        return model.info()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocabulary.tokenize(text, add_bos=add_special, parse_special=parse_special)

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        return self._vocabulary.tokenize_spans(text, literals)

    def tokenize_continuation(self, text: str) -> list[int]:
        return self._vocabulary.tokenize_continuation(text)

    def tokenize_input(self, text: str, *, query: str | None) -> list[int]:
        if query is None:
            return self._vocabulary.tokenize_input(text)
        return self._vocabulary.tokenize_pair(query, text, self._model.rank_template)

    def detokenize(self, tokens: list[int]) -> bytes:
        return self._vocabulary.detokenize(tokens)

    def least_tokens(self, text: str) -> int:
        return self._vocabulary.least_tokens(text)

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
        for token in sequence.said:
            sampler.accept(token)
        assert len(prompt) < self._model.context_tokens, "the caller refuses prompts that leave no room"
        views = [self._cells.view(slot) for slot in self._slots]
        # A prompt whose own tokens are scored must be evaluated whole: one token shares nothing with any slot.
        known = prompt[:1] if sequence.scores_prompt else prompt
        choice = choose_slot(known, views, rewinds=self._model.rewinds)
        slot = self._slots[choice.slot]
        if choice.copy_from is not None:
            # Only whole: with a stream for each slot, llama.cpp aborts the process on a copy of a part.
            lib.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
            lib.llama_memory_seq_cp(self._memory, choice.copy_from, slot.index, -1, -1)
            slot.sound = True
        slot.tokens = list(prompt)
        slot.past = choice.cached
        self._rewind(slot)
        slot.sequence, slot.sampler = sequence, sampler
        slot.lookup = PromptLookup()
        slot.scorer = PromptScorer(sequence, self._vocabulary, len(prompt)) if sequence.scores_prompt else None
        sequence.cached_tokens = slot.past
        self._active[sequence.rid] = slot
        self._cells.hold(slot)

    def remove(self, sequence: Sequence) -> None:
        """What the slot holds stays for later; a sequence that is not here any more is no error."""
        if self._embedder is not None:
            self._embedder.remove(sequence)
            return
        slot = self._active.pop(sequence.rid, None)
        if slot is None:
            return
        self._cells.leave(slot)
        self._uses += 1
        slot.used = self._uses
        slot.sequence = slot.sampler = slot.scorer = None
        slot.guess = []

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> Iterable[Event]:
        """One call of the model for the running answers, and one for prompts. A batch that llama.cpp refuses costs the
        newest sequence in it and changes no other.

        Raises RuntimeError when the context is broken: the engine cannot go on.
        """
        if self._embedder is not None:
            return self._embedder.step()
        if not self._active:
            return []
        self._cells.release(len(self._active) - len(self._cells.held))
        due = [(slot.index, self._due(slot)) for slot in self._running()]
        answers = [index for index, tokens in due if tokens == 1]
        prompts = [one for one in due if one[1] > 1]
        if self._budget.comes_first(len(answers), len(prompts), sum(tokens for _, tokens in prompts)):
            answers = []
        calls = [
            plan_answers(answers, room=BATCH, can_fill=self._can_fill),
            plan_prompts(prompts, budget=self._budget.tokens(len(answers), len(prompts)), room=BATCH),
        ]
        guessed = bool(self._model.speculation and not prompts and self._guess(calls[0]))
        events: list[Event] = []
        for call, chunks in enumerate(calls):
            if not chunks:
                continue
            asked = self._fill(chunks)
            began = time.monotonic()
            code = self._batch.decode(self._context)
            if code != 0:
                return events + self._refused(code, chunks)
            if not guessed:  # a step with guesses in it says nothing about those without
                self._learn(len(answers), chunks if call else [], time.monotonic() - began)
            self._advance(chunks)
            if asked:
                events += self._produce(asked)
        return events

    def _learn(self, answers: int, prompts: list[Chunk], seconds: float) -> None:
        """From a call for ``answers`` running answers or, beside them, for ``prompts``."""
        tokens = sum(chunk.tokens for chunk in prompts)
        if tokens and answers:
            self._budget.observe_apart(tokens, seconds)
        else:
            self._budget.observe(answers, tokens, seconds)

    def _advance(self, chunks: list[Chunk]) -> None:
        for index, count, filler in chunks:
            slot = self._slots[index]
            if filler:
                self._rewind(slot)
            else:
                slot.past += count

    def _running(self) -> list[Slot]:
        """All but those that must wait; oldest first."""
        held = self._cells.held
        return [slot for slot in self._active.values() if slot not in held]

    def _guess(self, chunks: list[Chunk]) -> bool:
        """Only where no prompt is in the batch, which would have to wait for what may be of no use, and no filler, which
        has one token and so would cost a pass.
        """
        if any(chunk.filler for chunk in chunks):
            return False
        return guess_ahead([self._slots[chunk.slot] for chunk in chunks], self._model.speculation, BATCH - len(chunks))

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
            past, taken, rows = slot.past, count, 0
            if filler:
                assert self._filler is not None, "else no slot can be filled"
                tokens.append(self._filler)  # nobody reads what comes of it
            else:
                tokens += slot.tokens[past : past + count]
                if slot.scorer is not None:
                    rows = count
                else:  # at least one, also in the middle of a prompt: it is judged by it
                    tokens += slot.guess
                    taken += len(slot.guess)
                    rows = 1 + len(slot.guess)
                asked.append((slot, rows))
            positions += range(past, past + taken)
            sequences += (index,) * taken
            outputs += (0,) * (taken - rows) + (1,) * rows
        self._batch.fill(tokens, positions, sequences, outputs)
        return asked

    def _produce(self, asked: list[tuple[Slot, int]]) -> list[Event]:
        rows = self._batch.logits(self._context, sum(count for _, count in asked), self._vocabulary.size)
        events: list[Event] = []
        done = 0
        for slot, count in asked:
            its = rows[done : done + count]
            done += count
            numbers = self._cells.judge(slot, its[-1])
            if numbers:
                self._filler = slot.tokens[0]
            if slot.scorer is not None:
                # What a refused batch took back is evaluated again, and was told already.
                told = max(slot.scorer.done - (slot.past - count), 0)
                if told >= count:
                    continue
                part = slot.scorer.take(its[told:])
                events.append(part)
                if not part.last or not part.sequence.limit:
                    continue
                slot.scorer = None
                its = its[-1:]
            if not numbers and not slot.guess:  # else it may be the guess that makes no sense
                assert slot.sequence is not None
                events.append(SequenceFailed(slot.sequence, "the model's values are no numbers any more (NaN)"))
                continue
            if slot.past < len(slot.tokens):
                continue
            past = slot.past
            events += slot.choose(its, self._vocabulary)
            if slot.guess:
                slot.lookup.judge(slot.past - past, len(slot.guess), len(slot.tokens))
                slot.guess = []
                self._rewind(slot)
        return events

    def _refused(self, code: int, chunks: list[Chunk]) -> list[Event]:
        if code not in _RECOVERABLE:
            raise RuntimeError(f"llama_decode failed with {code}: {native_log.cause('no reason given')}")
        for slot in self._slots:
            slot.guess = []
            self._rewind(slot)
        refused = {chunk.slot for chunk in chunks}
        for index in refused:
            self._slots[index].sound = False  # a part of it may have been evaluated, and nobody saw of what kind
        newest = [slot for slot in self._active.values() if slot.index in refused][-1].sequence
        assert newest is not None
        return [SequenceFailed(newest, f"llama.cpp refused the batch (code {code})")]

    def _can_fill(self, index: int) -> bool:
        slot = self._slots[index]
        idle = slot.sequence is None and slot.sound and slot.past < self._model.context_tokens
        return self._model.rewinds and self._filler is not None and idle

    def _rewind(self, slot: Slot) -> None:
        """Make the KV stream hold what ``past`` says and no more; nothing at all where it cannot be cut."""
        if not lib.llama_memory_seq_rm(self._memory, slot.index, slot.past, -1):
            lib.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
            slot.past = 0
