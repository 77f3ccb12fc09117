"""The grammar checker: ``python -m slimproc.engines.grammar.checker PARENT_PID``, a child of an engine.

Compiling a caller's grammar can overflow the native stack (a chain of 3,000 references), take minutes, or all memory
(``{"multipleOf": 999983}``). Here each one is first tried in a process of its own, which may die of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from slimproc.engines import lifeline
from slimproc.engines.grammar import library, protocol
from slimproc.engines.grammar.matcher import GrammarError, GrammarMatcher
from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.request import GrammarSpec

DEADLINE = 5.0
"""Seconds to translate, compile and try one grammar. Usual ones take milliseconds, the largest reasonable ones one."""
_MEMORY = 256 << 20
"""Bytes beyond what the checker has itself. Usual grammars take one or two million, the largest reasonable ones 60."""
_STACK = 4 << 20
"""Half of what the engine's threads have at least: what gets by here does not overflow there."""
_ANY = LLMatcher.grammar_from_json_schema('{"type":"object"}')
_TRIAL_STEPS = 32
_FAR_ABOVE = 1 << 38
"""Bytes: more than a checker has, and less than any machine's address space."""
_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_TOO_MANY = "too many"
"""What the library says where one of its limits is met: "too many expressions constructed"."""
_SLOW_MASK = 0.25
"""Seconds for one mask that are too many: running streams would wait for every such step."""


def main(parent: int) -> None:
    """Serve until the engine closes our stdin."""
    lifeline.tie_to_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    table = protocol.decode_table(protocol.read(0))
    vocabulary = GrammarVocabulary(table.tokens, table.ends)
    tokenizer = library.make_tokenizer(vocabulary)
    protocol.write(1, protocol.READY)
    while True:
        try:
            spec = protocol.decode_spec(protocol.read(0))
        except EOFError:
            return
        protocol.write(1, protocol.encode(_check(spec, tokenizer, vocabulary)))


def _check(spec: GrammarSpec, tokenizer: LLTokenizer, vocabulary: GrammarVocabulary) -> protocol.Verdict:
    """Try it in a forked child: this process has one thread, and the child needs nothing but what is in memory."""
    receive, send = os.pipe()
    checker = os.getpid()
    child = os.fork()
    if child == 0:
        lifeline.tie_to_parent(checker)
        os.close(receive)
        _be_tried(spec, tokenizer, vocabulary, send)
    os.close(send)
    try:
        return protocol.decode_verdict(protocol.read(receive, DEADLINE))
    except TimeoutError:
        return protocol.Verdict(refusal=f"compiling it takes more than {DEADLINE:g} s", final=False)
    except EOFError:
        return protocol.Verdict(refusal="compiling it takes too much memory or nesting")
    finally:
        os.close(receive)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_tried(spec: GrammarSpec, tokenizer: LLTokenizer, vocabulary: GrammarVocabulary, send: int) -> None:
    """The child's whole life."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # a panic's or an allocator's last words are not for the engine's log
        os.dup2(null, fd)
    for kind, limit in ((resource.RLIMIT_AS, _address_space() + _MEMORY), (resource.RLIMIT_CPU, int(DEADLINE) + 1)):
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit on memory
            resource.setrlimit(kind, (limit, limit))
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_try, args=(spec, tokenizer, vocabulary, send))
    thread.start()
    thread.join()
    os._exit(0)


def _try(spec: GrammarSpec, tokenizer: LLTokenizer, vocabulary: GrammarVocabulary, send: int) -> None:
    library.compile_grammar(tokenizer, _ANY)  # so that pages which any grammar touches do not count as this one's
    before = _resident()
    try:
        grammar = library.translate(spec)
        compiled = library.compile_grammar(tokenizer, grammar)
        size = _resident() - before
        _walk(GrammarMatcher(compiled.deep_copy(), len(vocabulary.tokens)), vocabulary.ends)
        del compiled  # letting go of it recurses as deep as building it
        verdict = protocol.Verdict(grammar=grammar, size=max(0, size))
    except library.GrammarRefusedError as refusal:
        verdict = protocol.Verdict(refusal=str(refusal))
    except MemoryError:
        verdict = protocol.Verdict(refusal="compiling it takes too much memory")
    protocol.write(send, protocol.encode(verdict))


def _walk(matcher: GrammarMatcher, ends: Collection[int]) -> None:
    """Take some steps at random, as far as it goes. Raises GrammarRefusedError if there is no first one, if they take too long, or if they
    meet a limit of the library's; a dead end further on is no fault that could be told from bad luck.
    """
    dice = random.Random(0)  # noqa: S311  # any way will do, the same one every time
    for step in range(_TRIAL_STEPS):
        began = time.thread_time()
        try:
            allowed = np.flatnonzero(matcher.mask())
            if time.thread_time() - began > _SLOW_MASK:
                raise library.GrammarRefusedError("following it takes too much time")
            further = np.setdiff1d(allowed, list(ends))
            if not further.size:
                return
            matcher.accept(int(dice.choice(further)))
        except GrammarError as error:
            if step == 0 or _TOO_MANY in str(error):
                raise library.GrammarRefusedError(f"nothing can satisfy it, or it is too complex ({error})") from None
            return
        if matcher.stopped:
            return


def _address_space() -> int:
    """Bytes. What ``/proc`` would tell is closed to a confined process, so the kernel is asked by trying: under a limit
    far above it, the largest mapping that still fits says how much there is already.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = _FAR_ABOVE if before[1] == resource.RLIM_INFINITY else min(_FAR_ABOVE, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    except (OSError, ValueError):  # macOS
        return _FAR_ABOVE
    fits, too_large = 0, limit // mmap.PAGESIZE
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        try:
            mmap.mmap(-1, middle * mmap.PAGESIZE, flags=_UNTOUCHED, prot=0).close()
            fits = middle
        except OSError:
            too_large = middle
    resource.setrlimit(resource.RLIMIT_AS, before)
    return limit - fits * mmap.PAGESIZE


def _resident() -> int:
    """Bytes at their peak, which in a forked child begins with what it has."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main(int(sys.argv[1]))
