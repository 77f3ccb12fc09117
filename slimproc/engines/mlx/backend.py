"""MlxBackend: advances all sequences by one call of mlx-lm's BatchGenerator a step; a failed step costs all, once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from slimproc.engines.backend import Event, Produced, Scored, SequenceFailed
from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.engines.logprobs import score
from slimproc.engines.mlx.following import Follower, Recorder
from slimproc.engines.mlx.library import BatchGenerator, mx
from slimproc.engines.mlx.model import LoadedModel
from slimproc.engines.mlx.prefix import PrefixCache
from slimproc.engines.mlx.sampling import make_processors, make_sampler
from slimproc.engines.mlx.scoring import PromptReader
from slimproc.engines.prefill import PrefillBudget
from slimproc.engines.prefix import common_prefix
from slimproc.engines.sequence import Sequence
from slimproc.errors import InvalidRequest
from slimproc.ipc.wire import ModelInfo
from slimproc.settings import EngineSettings

_MOST_PROMPT_TOKENS = 256
"""Prompt tokens in one step: nothing interrupts a step, and the running answers wait for it."""
_LEAST_PROMPT_TOKENS = 16
"""A prompt's part is a pass over the weights of its own, however short, so a shorter one would hardly be quicker."""
_WORTH_A_COPY = 32
"""Common tokens for which a running sequence's KV is copied, or a prompt waits for the one that evaluates them."""


class Run:
    """One sequence here: first in the queue (no ``uid``), then with prompt tokens left, then answering."""

    __slots__ = ("failed", "follower", "left", "processors", "reader", "recorder", "sampler", "sequence", "uid")

    def __init__(self, sequence: Sequence, vocab_size: int, ends: frozenset[int]) -> None:
        """Raises InvalidRequest for a bias outside the vocabulary."""
        params = sequence.sampling
        self.sequence = sequence
        self.sampler = make_sampler(params, vocab_size)
        self.recorder = None if sequence.logprobs is None else Recorder()
        self.follower: Follower | None = None
        barred = ends if params.ignore_eos else frozenset[int]()
        if sequence.grammar is not None:
            self.follower = Follower(sequence.grammar, ends, ignore_ends=params.ignore_eos)
            barred = frozenset()
        adjusting = make_processors(params, sequence.prompt, vocab_size, barred, sequence.said)
        self.processors = [one for one in (self.recorder, *adjusting, self.follower) if one is not None]
        self.reader: PromptReader | None = None
        """While the prompt's own tokens are still to be scored."""
        self.uid: int | None = None
        """Its name in the generator."""
        self.left = len(sequence.prompt)
        """Prompt tokens that are not evaluated yet; 0 while it answers."""
        self.failed = False


class MlxBackend:
    """The ``Backend`` over mlx-lm. The generator never ends a sequence by itself: that is the caller's to say."""

    poll_interval: float | None = None
    gives_logprobs = gives_prompt_logprobs = True
    uses_gpu = bool(mx.default_device() != mx.Device(mx.cpu))

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._generator: Any = None

    def load(self, progress: Callable[[float], None]) -> ModelInfo:
        """Raises LoadFailed. Once only; ``close`` undoes it."""
        model = self._model = LoadedModel(self._settings, progress)
        self._vocabulary = model.vocabulary
        self._prefixes = PrefixCache(model.prefix_bytes)
        self._budget = PrefillBudget(_MOST_PROMPT_TOKENS)
        self._reading: deque[Run] = deque()
        """Those whose prompts are to be scored first, oldest first."""
        self._waiting: deque[Run] = deque()
        self._active: dict[int, Run] = {}
        """By rid, oldest first, those that wait or read among them."""
        self._by_uid: dict[int, Run] = {}
        self._broken: str | None = None
        """Why the generator cannot go on, where that came out between two steps."""
        self._renew()
        return model.info()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocabulary.tokenize(text, add_bos=add_special, parse_special=parse_special)

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        return self._vocabulary.tokenize_spans(text, literals)

    def tokenize_continuation(self, text: str) -> list[int]:
        return self._vocabulary.tokenize_continuation(text)

    def detokenize(self, tokens: list[int]) -> bytes:
        return self._vocabulary.detokenize(tokens)

    def least_tokens(self, text: str) -> int:
        return self._vocabulary.least_tokens(text)

    def grammar_vocabulary(self) -> GrammarVocabulary:
        return self._vocabulary.grammar_vocabulary()

    def close(self) -> None:
        """Let go of the model and all that belongs to it. No other method may be called afterwards."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None
        mx.clear_cache()

    # --- joining and leaving ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary, in the prompt or in ``logit_bias``."""
        prompt, size = sequence.prompt, self._vocabulary.size
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self._vocabulary.check(prompt, param="prompt")
        run = Run(sequence, size, self._vocabulary.ends)
        assert len(prompt) < self._model.context_tokens, "the caller refuses prompts that leave no room"
        self._active[sequence.rid] = run
        if sequence.scores_prompt:
            run.reader = PromptReader(sequence, self._model)
            self._reading.append(run)
        else:
            self._waiting.append(run)

    def remove(self, sequence: Sequence) -> None:
        """Its KV is kept for a prompt that begins alike; a sequence that is not here any more is no error."""
        run = self._active.pop(sequence.rid, None)
        if run is None:
            return
        if run.uid is None:
            for queue in (self._waiting, self._reading):
                if run in queue:
                    queue.remove(run)
            return
        del self._by_uid[run.uid]
        try:
            with mx.stream(self._generator.stream):
                kept = self._generator.remove([run.uid], return_prompt_caches=not run.failed)
                if not run.failed:
                    cache, tokens = kept[run.uid]
                    self._prefixes.keep(list(tokens), cache)
        except Exception as error:  # noqa: BLE001  # out of memory, or a bug in the library: the batch is lost either way
            self._broken = _reason(error)

    def _join(self) -> None:
        """Let waiting sequences into the generator, in their order, as many as one step's prompt tokens are for."""
        room = self._prompt_room()
        while self._waiting and sum(run.left for run in self._by_uid.values()) < room:
            if self._soon_known(self._waiting[0]):
                break
            self._insert(self._waiting.popleft())

    def _insert(self, run: Run) -> None:
        prompt = run.sequence.prompt
        self._keep_running(prompt)
        cache, shared = self._prefixes.lend(prompt) or (self._model.new_cache(), 0)
        (run.uid,) = self._generator.insert(
            [prompt[shared:]],
            max_tokens=[self._model.context_tokens],
            caches=[cache],
            all_tokens=[prompt[:shared]],
            samplers=[run.sampler],
            logits_processors=[run.processors],
        )
        assert run.uid is not None
        self._by_uid[run.uid] = run
        run.left = len(prompt) - shared
        run.sequence.cached_tokens = 0 if run.sequence.scores_prompt else shared  # what was read for it alone counts

    def _soon_known(self, run: Run) -> bool:
        """Whether a prompt that is being evaluated begins alike: then waiting is quicker (``n``, a common preamble)."""
        return (
            self._worth_more(run.sequence.prompt, [other for other in self._by_uid.values() if other.left]) is not None
        )

    def _keep_running(self, prompt: list[int]) -> None:
        """Copy the KV of the answering sequence whose prompt begins most like ``prompt``, where that is worth it."""
        best = self._worth_more(prompt, [run for run in self._by_uid.values() if not run.left])
        if best is not None:
            with mx.stream(self._generator.stream):
                cache, tokens = self._generator.extract_cache([best.uid])[best.uid]
                self._prefixes.keep(list(tokens), cache)

    def _worth_more(self, prompt: list[int], runs: list[Run]) -> Run | None:
        if not runs or not self._model.rewinds:
            return None
        shared = [common_prefix(prompt, run.sequence.prompt) for run in runs]
        if max(shared) < _WORTH_A_COPY or max(shared) - self._prefixes.longest(prompt) < _WORTH_A_COPY:
            return None
        return runs[shared.index(max(shared))]

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One call of the generator. Should it raise, or lose sequences, all that run fail and it is made anew."""
        if not self._active:
            return []
        if self._broken is not None:
            return self._fail_all(self._broken)
        scored = self._read_prompt()
        return scored + self._generate() if self._by_uid or self._waiting else scored

    def _read_prompt(self) -> list[Event]:
        """The next part of the oldest prompt that is to be scored. An error here is its own and nobody else's."""
        if not self._reading:
            return []
        run = self._reading[0]
        assert run.reader is not None
        try:
            with mx.stream(self._generator.stream):
                event = run.reader.read()
                if event.last:
                    self._prefixes.keep(run.reader.tokens, run.reader.cache)
        except Exception as error:  # noqa: BLE001  # out of memory, most likely
            self._reading.popleft()
            return [SequenceFailed(run.sequence, f"mlx failed on the prompt: {_reason(error)}")]
        if event.last:
            self._reading.popleft()
            run.reader = None
            if run.sequence.limit:
                self._waiting.append(run)
        return [event]

    def _generate(self) -> list[Event]:
        try:
            self._join()
            answering = self._answering()
            prefilling = len(self._by_uid) - answering
            if prefilling:
                self._generator.prefill_step_size = max(1, self._prompt_room() // prefilling)
            began = time.monotonic()
            prompts, answers = self._generator.next()
        except Exception as error:  # noqa: BLE001  # whatever it is, the neighbours' caches are out of step now
            return self._fail_all(_reason(error))
        seconds = time.monotonic() - began
        if len(prompts) + len(answers) < len(self._by_uid):
            return self._fail_all("the generator has lost sequences")
        self._budget.observe(answering, self._note_prompts(prompts), seconds)
        return [self._take(self._by_uid[answer.uid], answer) for answer in answers]

    def _note_prompts(self, prompts: list[Any]) -> int:
        """How many prompt tokens were evaluated."""
        evaluated = 0
        for response in prompts:
            run = self._by_uid[response.uid]
            done, total = response.progress
            left = 0 if response.end_of_prompt else total - done
            evaluated += run.left - left
            run.left = left
        return evaluated

    def _take(self, run: Run, answer: Any) -> Event:
        token: int = answer.token
        sequence, follower = run.sequence, run.follower
        if follower is not None and follower.failure is not None:
            run.failed = True
            return SequenceFailed(sequence, follower.failure)
        # An evaluated array is read in place; asking MLX for the number would wait for the next step.
        if not math.isfinite(np.asarray(answer.logprobs)[token]):
            run.failed = True
            return SequenceFailed(sequence, "the model gave no token that can be chosen (NaN or all barred)")
        end = token in self._vocabulary.ends
        piece = b"" if end else self._vocabulary.piece(token)
        end = end or (follower is not None and follower.complete)
        if run.recorder is None:
            return Produced(sequence, piece, end)
        its = score(run.recorder.take(), token, piece, sequence.logprobs or 0, self._vocabulary.spelled)
        return Scored(sequence, its, end)

    def _fail_all(self, reason: str) -> list[Event]:
        """Those that only wait have lost nothing."""
        lost = [run for run in self._active.values() if run not in self._waiting and run not in self._reading]
        for run in lost:
            del self._active[run.sequence.rid]
        self._by_uid.clear()
        self._renew()
        message = f"mlx failed in this step, and all its sequences with it: {reason}"
        return [SequenceFailed(run.sequence, message) for run in lost]

    def _renew(self) -> None:
        if self._generator is not None:
            self._generator.close()
        slots = self._model.slots
        self._broken = None
        self._generator = BatchGenerator(
            self._model.network,
            completion_batch_size=slots,
            prefill_batch_size=slots,
            prefill_step_size=_MOST_PROMPT_TOKENS,  # its batches go on cutting by this; our own cut is made before
        )

    def _prompt_room(self) -> int:
        """How many prompt tokens the next step may take, all prompts together."""
        return max(self._budget.tokens(self._answering()), _LEAST_PROMPT_TOKENS)

    def _answering(self) -> int:
        return sum(not run.left for run in self._by_uid.values())


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
