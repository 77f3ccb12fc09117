"""Compiling beside the step loop: what is refused, what is kept, and what a compiler survives."""

from __future__ import annotations

import os
import select
import signal
import time

import psutil
import pytest

from slimproc.engines.grammar.cache import GrammarCache
from slimproc.engines.grammar.compiler import GrammarCompiler
from slimproc.engines.grammar.matcher import GrammarMatcher
from slimproc.errors import EngineError, InvalidRequest
from slimproc.request import GrammarSpec
from tests.grammars import BAD_SCHEMAS, BAD_TEXTS, ENDLESS, PERSON, byte_vocabulary, schema

LIMIT = 30.0


class Asker:
    """A compiler, and the engine thread that asks it."""

    def __init__(self, vocabulary=byte_vocabulary) -> None:
        self.compiler = GrammarCompiler(vocabulary)
        self.rid = 0

    def begin(self, spec: GrammarSpec) -> int:
        self.rid += 1
        assert self.compiler.request(self.rid, spec) is None
        return self.rid

    def wait(self, rid: int):
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            select.select([self.compiler.fd], [], [], 1.0)
            for compiled in self.compiler.done():
                if compiled.rid == rid:
                    return compiled.outcome
        raise AssertionError("no outcome in time")

    def ask(self, spec: GrammarSpec):
        self.rid += 1
        known = self.compiler.request(self.rid, spec)
        return known or self.wait(self.rid)

    def refusal(self, spec: GrammarSpec) -> InvalidRequest:
        try:
            outcome = self.ask(spec)
        except InvalidRequest as error:
            return error
        assert isinstance(outcome, InvalidRequest), outcome
        return outcome

    @property
    def checker(self) -> int:
        return self.compiler._checker.pid


@pytest.fixture(scope="module")
def shared():
    asker = Asker()
    yield asker
    asker.compiler.close()


@pytest.fixture
def asker():
    asker = Asker()
    yield asker
    asker.compiler.close()


def test_a_good_schema_gives_a_matcher_of_ones_own(shared):
    first, second = shared.ask(schema(PERSON)), shared.ask(schema(PERSON))
    assert isinstance(first, GrammarMatcher)
    first.accept(ord("{") + 3)
    assert second.mask()[ord("{") + 3]
    assert not first.mask()[ord("{") + 3]


@pytest.mark.parametrize("what", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_compiled_is_refused_and_names_the_field(shared, what):
    refusal = shared.refusal(schema(BAD_SCHEMAS[what], "response_format"))
    assert refusal.param == "response_format"
    assert refusal.message.startswith("response_format: ")
    assert isinstance(shared.ask(schema(PERSON)), GrammarMatcher), "and the next one is compiled"


@pytest.mark.parametrize("what", BAD_TEXTS)
def test_a_text_that_cannot_be_compiled_is_refused_and_names_the_field(shared, what):
    kind, text = BAD_TEXTS[what]
    assert shared.refusal(GrammarSpec(kind, text, "grammar")).param == "grammar"
    assert isinstance(shared.ask(schema(PERSON)), GrammarMatcher)


def test_what_was_refused_is_refused_at_once_the_next_time(asker):
    spec = schema({"type": "strin"})
    asker.refusal(spec)
    with pytest.raises(InvalidRequest, match="strin"):
        asker.compiler.request(99, spec)


def test_what_takes_too_long_is_refused_in_time_and_leaves_no_process(asker):
    assert isinstance(asker.ask(schema(PERSON)), GrammarMatcher)
    began = time.monotonic()
    rid = asker.begin(schema(ENDLESS))
    known = asker.compiler.request(99, schema(PERSON))
    assert isinstance(known, GrammarMatcher), "what is known does not wait behind it"
    outcome = asker.wait(rid)
    assert isinstance(outcome, InvalidRequest)
    assert "5 s" in outcome.message or "memory" in outcome.message
    assert time.monotonic() - began < LIMIT
    assert psutil.Process(asker.checker).children() == []
    with pytest.raises(InvalidRequest):
        asker.compiler.request(100, schema(ENDLESS))  # and the next one does not hold up others for as long again


def test_a_panic_in_the_compiler_costs_one_request_and_not_its_thread(asker, monkeypatch):
    class PanicException(BaseException):  # pyo3's own name
        pass

    def panic(*_):
        raise PanicException("no")

    asker.ask(schema(PERSON))
    with monkeypatch.context() as patched:
        patched.setattr(asker.compiler._bench._library, "compile_grammar", panic)
        assert isinstance(asker.ask(schema({"type": "array"})), EngineError)
    assert isinstance(asker.ask(schema({"type": "array"})), GrammarMatcher)


def test_a_cancelled_one_is_never_heard_of(asker):
    slow, gone, last = asker.begin(schema(ENDLESS)), asker.begin(schema({"type": "array"})), asker.begin(schema(PERSON))
    asker.compiler.cancel(slow)
    asker.compiler.cancel(gone)
    heard = []
    deadline = time.monotonic() + LIMIT
    while last not in heard:
        assert time.monotonic() < deadline
        select.select([asker.compiler.fd], [], [], 1.0)
        heard += [compiled.rid for compiled in asker.compiler.done()]
    assert heard == [last]


def test_a_checker_that_is_killed_costs_one_request(asker):
    asker.ask(schema(PERSON))
    os.kill(asker.checker, signal.SIGKILL)
    assert isinstance(asker.ask(schema({"type": "object"})), EngineError)
    assert isinstance(asker.ask(schema({"type": "object"})), GrammarMatcher)


def test_closing_ends_the_checker_also_in_the_middle_of_its_work():
    asker = Asker()
    asker.ask(schema(PERSON))
    checker = psutil.Process(asker.checker)
    asker.begin(schema(ENDLESS))
    asker.compiler.close()
    assert not checker.is_running()


def test_a_compiler_that_nobody_asks_starts_nothing():
    def vocabulary():
        raise AssertionError("nobody asked")

    asker = Asker(vocabulary)
    before = psutil.Process().children()
    asker.compiler.close()
    assert psutil.Process().children() == before


def test_a_backend_without_grammars_refuses_every_one_by_its_own_field():
    def vocabulary():
        raise InvalidRequest("it follows no grammar")

    asker = Asker(vocabulary)
    for param in ("guided_regex", "grammar"):
        refusal = asker.refusal(GrammarSpec("regex", "a", param))
        assert (refusal.param, refusal.message) == (param, f"{param}: it follows no grammar")
    asker.compiler.close()


@pytest.mark.slow
def test_memory_stays_flat_over_many_different_schemas(asker):
    def compile_some(numbers: range) -> int:
        for number in numbers:
            what = {"type": "object", "properties": {f"key{number}": {"type": "string"}}}
            assert isinstance(asker.ask(schema(what)), GrammarMatcher)
        return psutil.Process().memory_info().rss

    before = compile_some(range(100))
    after = compile_some(range(100, 1000))
    assert after - before < 8 << 20
    assert len(asker.compiler._bench._cache) <= 64


def test_a_cache_is_bounded_by_number_and_by_bytes():
    cache = GrammarCache(most=3, most_bytes=1000)
    specs = [GrammarSpec("regex", f"a{number}", "p") for number in range(5)]
    for spec in specs[:4]:
        cache.keep(spec, object(), 10)
    assert [cache.compiled(spec) is not None for spec in specs[:4]] == [False, True, True, True]
    assert cache.compiled(specs[1]) is not None  # used last, so it stays
    cache.keep(specs[4], object(), 990)
    assert [cache.compiled(spec) is not None for spec in specs] == [False, False, False, False, True]
    cache.keep(specs[0], object(), 2000)
    assert len(cache) == 1
    assert cache.bytes == 992


def test_a_refusal_for_time_stands_for_a_minute_and_any_other_for_good():
    now = [100.0]
    cache = GrammarCache(clock=lambda: now[0])
    slow, wrong = GrammarSpec("regex", "a", "p"), GrammarSpec("regex", "b", "p")
    cache.keep_refusal(slow, "it takes more than 5 s", final=False)
    cache.keep_refusal(wrong, "it makes no sense")
    now[0] += 59
    assert cache.refusal(slow) == "it takes more than 5 s"
    now[0] += 2
    assert cache.refusal(slow) is None
    assert cache.refusal(wrong) == "it makes no sense"


def test_equal_texts_of_two_kinds_are_two_grammars():
    cache = GrammarCache()
    cache.keep(GrammarSpec("regex", "a", "p"), object(), 1)
    assert cache.compiled(GrammarSpec("grammar", "a", "p")) is None
    assert cache.compiled(GrammarSpec("regex", "a", "another field")) is not None
