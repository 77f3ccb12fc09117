"""GrammarCompiler: compiles grammars in a thread beside the step loop, once the checker has survived them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from slimproc.engines.panics import is_failure
from slimproc.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from slimproc.engines.grammar.checking import CheckerProcess
    from slimproc.engines.grammar.matcher import GrammarMatcher
    from slimproc.engines.grammar.vocabulary import GrammarVocabulary
    from slimproc.request import GrammarSpec

_STACK = 64 << 20
"""Bytes for the compiling thread, of which only what is used is taken: many times what the checker does with."""
_CLOSE_LIMIT = 5.0


class Compiled(NamedTuple):
    """``outcome``: a matcher of this sequence's own, or why there is none."""

    rid: int
    outcome: GrammarMatcher | InvalidRequest | EngineError


class GrammarCompiler:
    """Its methods are the engine thread's. Nothing is built or started before the first request.

    ``fd`` is readable when ``done`` has something.
    """

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        """``vocabulary`` is called once, in the compiling thread; InvalidRequest from it is every request's answer."""
        self._make_vocabulary = vocabulary
        self._jobs: queue.SimpleQueue[tuple[int, GrammarSpec] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        self._thread: threading.Thread | None = None
        self._bench: _Bench | None = None
        self._unfit: InvalidRequest | None = None
        """Why no grammar at all can be followed here."""
        self._checker: CheckerProcess | None = None
        self._closed = False
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)

    def request(self, rid: int, spec: GrammarSpec) -> GrammarMatcher | None:
        """Ask for a matcher. None: ``done`` will have it, unless it is cancelled. Raises InvalidRequest for a spec that
        was refused before.
        """
        if self._bench is not None and (matcher := self._bench.known(spec)) is not None:
            return matcher  # whatever hard case the thread is at
        if self._thread is None:
            before = threading.stack_size(_STACK)
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)
        self._wanted.add(rid)
        self._jobs.put((rid, spec))
        return None

    def cancel(self, rid: int) -> None:
        """Nobody waits for it any more; if its turn has not come yet it is not compiled at all."""
        self._wanted.discard(rid)

    def done(self) -> list[Compiled]:
        """What has become ready since."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        ready = []
        while not self._done.empty():
            compiled = self._done.get()
            if compiled.rid in self._wanted:
                self._wanted.discard(compiled.rid)
                ready.append(compiled)
        return ready

    def close(self) -> None:
        """End the thread and the checker; nothing is compiled afterwards."""
        self._closed = True
        self._wanted.clear()
        self._jobs.put(None)
        checker = self._checker
        if checker is not None:
            checker.kill()
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT)
            if self._thread.is_alive():
                return  # in a native call, which it will want to tell of
        os.close(self.fd)
        os.close(self._wake)

    # --- the compiling thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            rid, spec = job
            if rid not in self._wanted or self._closed:
                continue
            outcome: GrammarMatcher | InvalidRequest | EngineError
            try:
                outcome = self._open_bench(spec).matcher(spec)
            except (InvalidRequest, EngineError) as error:
                outcome = error
            except BaseException as error:  # it must not end this thread, and with it all later grammars
                if not is_failure(error):
                    raise
                outcome = EngineError(f"the grammar compiler failed: {error!r}")
            self._done.put(Compiled(rid, outcome))
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._wake, b"\0")
        if self._bench is not None:
            self._bench.close()

    def _open_bench(self, spec: GrammarSpec) -> _Bench:
        """Raises InvalidRequest."""
        if self._bench is None and self._unfit is None:
            try:
                self._bench = _Bench(self._make_vocabulary(), self._note_checker)
            except InvalidRequest as error:
                self._unfit = error
            except ImportError as error:
                self._unfit = InvalidRequest(f"structured output needs a library that is not installed ({error})")
        if self._bench is None:
            assert self._unfit is not None
            raise _refused(spec, self._unfit.message)
        return self._bench

    def _note_checker(self, checker: CheckerProcess | None) -> None:
        self._checker = checker
        if checker is not None and self._closed:
            checker.kill()


class _Bench:
    """What compiling needs: the tokenizer, the checker, and the cache."""

    def __init__(self, vocabulary: GrammarVocabulary, note_checker: Callable[[CheckerProcess | None], None]) -> None:
        # Imported here because it costs 0.1 s, which most engines never need to spend.
        from slimproc.engines.grammar import cache, checking, library, matcher  # noqa: PLC0415

        if not vocabulary.ends:
            raise InvalidRequest("this model has no token that ends its text")
        self._library, self._matcher_type, self._checker_type = library, matcher.GrammarMatcher, checking.CheckerProcess
        self._vocabulary = vocabulary
        self._note_checker = note_checker
        self._cache = cache.GrammarCache()
        self._checker: CheckerProcess | None = None
        starting = checking.CheckerProcess()  # it imports while we build the same tokenizer as it will
        self._tokenizer: LLTokenizer = library.make_tokenizer(vocabulary)
        self._greet(starting)

    def known(self, spec: GrammarSpec) -> GrammarMatcher | None:
        """From any thread. Raises InvalidRequest for a spec that was refused before."""
        if (refusal := self._cache.refusal(spec)) is not None:
            raise _refused(spec, refusal)
        compiled = self._cache.compiled(spec)
        return None if compiled is None else self._started(compiled)

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """Raises InvalidRequest, EngineError."""
        if (matcher := self.known(spec)) is not None:
            return matcher
        grammar, size = self._checked(spec)
        try:
            compiled = self._library.compile_grammar(self._tokenizer, grammar)
        except self._library.GrammarRefusedError as error:
            raise _refused(spec, str(error)) from None
        self._cache.keep(spec, compiled, size)
        return self._started(compiled)

    def _started(self, compiled: LLMatcher) -> GrammarMatcher:
        return self._matcher_type(compiled.deep_copy(), len(self._vocabulary.tokens))

    def _checked(self, spec: GrammarSpec) -> tuple[str, int]:
        checker = self._checker or self._greet(self._checker_type())
        try:
            verdict = checker.check(spec)
        except EngineError:
            self._checker = None
            self._note_checker(None)
            raise
        if verdict.refusal is not None:
            self._cache.keep_refusal(spec, verdict.refusal, final=verdict.final)
            raise _refused(spec, verdict.refusal)
        return verdict.grammar, verdict.size

    def _greet(self, checker: CheckerProcess) -> CheckerProcess:
        """Raises EngineError."""
        self._note_checker(checker)
        try:
            checker.greet(self._vocabulary)
        except EngineError:
            self._note_checker(None)
            raise
        self._checker = checker
        return checker

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()


def _refused(spec: GrammarSpec, why: str) -> InvalidRequest:
    return InvalidRequest(f"{spec.param}: {why}", param=spec.param)
