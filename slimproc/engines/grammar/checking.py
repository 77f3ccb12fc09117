"""CheckerProcess: the grammar checker as its engine holds it: started, asked one thing at a time, ended."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from slimproc.engines.grammar import protocol
from slimproc.errors import EngineError

if TYPE_CHECKING:
    from slimproc.engines.grammar.vocabulary import GrammarVocabulary
    from slimproc.request import GrammarSpec

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""It forks, so it must have one thread only; and arenas of further threads would count against its limit on memory."""
_START_LIMIT = 60.0
_ANSWER_LIMIT = 30.0
"""Seconds. The checker keeps a deadline of its own, far below; past this one it is killed, and the next one started."""


class CheckerProcess:
    """Used by one thread, which must go on living: the kernel ends the process with the thread that started it."""

    def __init__(self) -> None:
        """Start it; ``greet`` comes next. Raises EngineError."""
        environ = os.environ | _ENVIRONMENT
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slimproc.engines.grammar.checker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                bufsize=0,
            )
        except OSError as error:
            raise EngineError(f"the grammar checker could not be started: {error}") from error

    def greet(self, vocabulary: GrammarVocabulary) -> None:
        """Tell it the vocabulary and wait until it is ready. Raises EngineError, and it is closed then."""
        answer = self._exchange(protocol.encode(protocol.Table(vocabulary.tokens, vocabulary.ends)), _START_LIMIT)
        assert answer == protocol.READY

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self, spec: GrammarSpec) -> protocol.Verdict:
        """Raises EngineError when the checker itself fails; it is closed then."""
        return protocol.decode_verdict(self._exchange(protocol.encode(spec), _ANSWER_LIMIT))

    def kill(self) -> None:
        """From any thread; who waits for an answer gets an EngineError."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _exchange(self, message: bytes, limit: float) -> bytes:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            protocol.write(stdin.fileno(), message)
            return protocol.read(stdout.fileno(), limit)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise EngineError(f"the grammar checker failed: {type(error).__name__}") from error
