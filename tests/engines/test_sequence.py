"""A sequence counts its tokens exactly, ends once, and says the same text streamed and whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Submit
from slimproc.request import Finish, Usage

CONTEXT = 64


def sequence(*, prompt=(1, 2, 3), context=CONTEXT, **options):
    return Sequence(Submit(rid=7, prompt="abc", **options), list(prompt), context)


def run(pieces, *, end=True, **options):
    """Everything that the front hears when the model makes ``pieces`` and then, perhaps, ends by itself."""
    one = sequence(**options)
    heard = []
    for piece in pieces:
        heard.append(one.advance(piece, end=False))
        if heard[-1] is not None and heard[-1].finish:
            break
    else:
        if end:
            heard.append(one.advance(b"", end=True))
    return [item for item in heard if item is not None]


def test_the_limit_is_the_smaller_of_max_tokens_and_the_room_left():
    assert sequence().limit == CONTEXT - 3
    assert sequence(max_tokens=5).limit == 5
    assert sequence(max_tokens=10**18).limit == CONTEXT - 3
    assert sequence(max_tokens=0).limit == 0


def test_exactly_max_tokens_tokens_are_generated_and_the_finish_is_length():
    heard = run([b"a", b"b", b"c", b"d"], max_tokens=3)

    assert [item.text for item in heard] == ["a", "b", "c"]
    assert heard[-1].finish == Finish.LENGTH
    assert heard[-1].usage == Usage(prompt_tokens=3, completion_tokens=3)


def test_the_end_token_of_the_model_is_not_counted():
    heard = run([b"a", b"b"])

    assert heard[-1].finish == Finish.STOP
    assert heard[-1].usage.completion_tokens == 2


def test_a_model_may_end_together_with_its_last_piece():
    item = sequence().advance(b"all", end=True)

    assert (item.text, item.finish, item.usage.completion_tokens) == ("all", Finish.STOP, 1)


def test_a_token_without_text_that_is_not_the_end_is_counted():
    """Else a model that makes only control tokens would never reach its limit."""
    heard = run([b"", b"", b"a"], max_tokens=3)

    assert len(heard) == 1
    assert (heard[0].text, heard[0].tokens, heard[0].finish) == ("a", 3, Finish.LENGTH)


def test_a_piece_that_fills_the_limit_says_length_even_when_the_model_ends_there():
    item = sequence(max_tokens=1).advance(b"a", end=True)

    assert item.finish == Finish.LENGTH


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC"),
        (["Par", "is."], ["Pari"], ""),
        (["Paris."], ["s.", "is"], "Par"),
        (["first", " more"], ["first"], ""),
    ],
)
def test_a_stop_string_ends_it_without_its_own_text(pieces, stop, text):
    heard = run([piece.encode() for piece in pieces], stop=tuple(stop))

    assert "".join(item.text for item in heard) == text
    assert heard[-1].finish == Finish.STOP


def test_tokens_are_counted_up_to_and_with_the_one_that_completes_the_stop_string():
    heard = run([b"ABC", b"DEF", b"G", b"HI", b"J", b"K"], stop=("DEFGHIJ",))

    assert heard[-1].usage.completion_tokens == 5


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop():
    assert run([b"a", b"stop"], stop=("stop",), max_tokens=2)[-1].finish == Finish.STOP


def test_a_match_that_waited_for_an_earlier_one_is_found_when_the_limit_comes():
    heard = run([b"a", b"bc"], stop=("abcd", "bc"), max_tokens=2)

    assert ("".join(item.text for item in heard), heard[-1].finish) == ("a", Finish.STOP)


def test_held_back_text_comes_with_the_end():
    heard = run([b"x", b"st", b"o"], stop=("stop",))

    assert [(item.text, item.tokens) for item in heard] == [("x", 1), ("sto", 2)]


def test_a_character_cut_by_the_limit_is_dropped_and_its_tokens_still_count():
    heard = run([b"a", b"\xf0", b"\x9f"], max_tokens=3)

    assert [(item.text, item.tokens) for item in heard] == [("a", 1), ("", 2)]
    assert heard[-1].usage.completion_tokens == 3


def test_a_character_that_the_model_itself_left_half_is_replaced():
    assert run([b"a", b"\xf0\x9f"])[-1].text == "\ufffd"


@pytest.mark.parametrize("finish", [Finish.CANCELLED, Finish.LENGTH])
def test_it_can_be_ended_between_two_tokens(finish):
    one = sequence(stop=("stop",))
    one.advance(b"st", end=False)

    item = one.end(finish)

    assert (item.rid, item.text, item.tokens, item.finish) == (7, "st", 1, finish)
    assert item.usage.completion_tokens == 1


def test_tokens_taken_from_a_cache_are_in_the_usage():
    one = sequence()
    one.cached_tokens = 2

    assert one.advance(b"a", end=True).usage == Usage(3, 1, 2)


def test_a_prompt_of_token_ids_has_no_text():
    assert Sequence(Submit(rid=1, prompt=[5, 6]), [5, 6], CONTEXT).prompt_text == ""


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xed\xa0", b"\xff", "😀".encode()])),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    st.integers(1, 12),
)
def test_streamed_counts_add_up_and_exactly_one_event_is_terminal(pieces, stops, limit):
    heard = run(pieces, stop=tuple(stops), max_tokens=limit)

    assert [bool(item.finish) for item in heard] == [False] * (len(heard) - 1) + [True]
    usage = heard[-1].usage
    assert sum(item.tokens for item in heard) == usage.completion_tokens
    assert usage.completion_tokens <= limit
    assert all(item.usage is None and item.text and item.tokens for item in heard[:-1])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xff"]), min_size=1),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_one_token_with_all_the_bytes_gives_the_same_text_and_finish_as_many_tokens(pieces, stops):
    many = run(pieces, stop=tuple(stops))
    one = run([b"".join(pieces)], stop=tuple(stops))

    assert "".join(item.text for item in many) == "".join(item.text for item in one)
    assert many[-1].finish == one[-1].finish
