"""TokenStream: the receiving end of one sequence."""

from __future__ import annotations

import pytest

from slimproc.errors import EngineCrashed, EngineError
from slimproc.ipc.wire import Tok
from slimproc.request import Finish, Usage
from slimproc.stream import TokenStream


class Told:
    """A stream, and what it told admission."""

    def __init__(self) -> None:
        self.stream = TokenStream(2)
        self.told: list[str] = []
        self.stream.on_first = lambda stream: self.told.append("first")
        self.stream.on_end = lambda stream: self.told.append("end")


def end(text: str = "", tokens: int = 1, finish: Finish = Finish.STOP) -> Tok:
    return Tok(1, text, tokens, int(finish), Usage(5, 3, 1))


@pytest.fixture
def told() -> Told:
    return Told()


def test_text_is_joined_and_tokens_are_counted(told):
    stream = told.stream
    stream.take(Tok(1, "a"), 100, None)
    stream.take(Tok(1, "bc", 2), 200, None)
    assert not stream.ended
    stream.take(end("d"), 300, None)
    assert (stream.text, stream.completion_tokens, stream.index) == ("abcd", 4, 2)
    assert (stream.first_at_ns, stream.last_at_ns) == (100, 300)
    assert (stream.finish, stream.usage) == (Finish.STOP, Usage(5, 3, 1))
    assert told.told == ["first", "end"]


def test_the_first_text_is_the_first_item_that_has_some(told):
    told.stream.take(Tok(1, "", 1), 100, None)
    assert told.told == []
    told.stream.take(Tok(1, "a"), 200, None)
    assert told.stream.first_at_ns == 200
    assert told.stream.completion_tokens == 2


def test_an_end_without_text_is_both_first_and_last(told):
    told.stream.take(end(tokens=0, finish=Finish.LENGTH), 100, None)
    assert told.told == ["first", "end"]
    assert told.stream.text == ""


def test_an_error_ends_it_once(told):
    error = EngineError("no")
    told.stream.fail(error)
    told.stream.fail(EngineCrashed("later"))
    assert told.told == ["end"]
    assert told.stream.error is error
    assert told.stream.ended


@pytest.mark.parametrize("first", ["error", "finish"])
def test_whatever_comes_after_its_end_does_not_end_it_again(told, first):
    if first == "error":
        told.stream.fail(EngineError("no"))
    else:
        told.stream.take(end(), 100, None)
    told.stream.take(end(), 200, None)
    told.stream.fail(EngineError("late"))
    assert told.told.count("end") == 1
    assert (told.stream.error is None) == (first == "finish")


def test_one_that_has_given_nothing_may_begin_again(told):
    told.stream.take(Tok(1, "", 3), 100, None)
    told.stream.fail(EngineCrashed("no"))
    told.stream.reset()
    assert (told.stream.ended, told.stream.completion_tokens) == (False, 0)
    told.stream.take(end("a"), 200, None)
    assert told.told == ["end", "first", "end"]


def test_one_that_is_joined_begins_again_without_its_text(told):
    told.stream.take(Tok(1, "lost"), 100, None)
    told.stream.fail(EngineCrashed("no"))
    told.stream.reset()
    told.stream.take(end("a"), 200, None)
    assert (told.stream.text, told.stream.first_at_ns) == ("a", 200)


class Delivering(TokenStream):
    delivered = True


def test_one_that_has_given_text_to_its_client_may_not():
    stream = Delivering()
    stream.take(Tok(1, "a"), 100, None)
    stream.fail(EngineCrashed("no"))
    with pytest.raises(AssertionError, match="cannot be taken back"):
        stream.reset()
