"""The text of an answer does not depend on how it was cut into tokens, and what was given out is never taken back."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.engines.text import TextAssembler

BROKEN = "\ufffd"


def assemble(pieces, stops=(), *, cut=False):
    """The streamed texts, the joined text and whether a stop string ended it."""
    text = TextAssembler(tuple(stops))
    streamed = []
    for piece in pieces:
        streamed.append(text.push(piece))
        if text.stopped:
            return streamed, "".join(streamed), True
    streamed.append(text.flush(cut=cut))
    return streamed, "".join(streamed), text.stopped


def is_half_a_character(data):
    """Whether more bytes could make one whole character of ``data``: tried out, not reasoned."""
    if not 1 <= len(data) <= 3:
        return False
    tails = ("80", "90", "9f", "a0", "bf", "8080", "9080", "a080", "bfbf", "8fbf", "808080", "908080", "8fbfbf")
    for tail in map(bytes.fromhex, tails):
        try:
            if len((data + tail).decode()) == 1:
                return True
        except UnicodeDecodeError:
            pass
    return False


def expected(data, stops, *, cut):
    """The whole answer at once: decoded in one go, cut at the earliest match."""
    if cut:
        for length in (3, 2, 1):
            if is_half_a_character(data[-length:]):
                data = data[:-length]
                break
    text = data.decode("utf-8", "replace")
    at = min((text.find(stop) for stop in stops if stop in text), default=None)
    return text[:at], at is not None


# Few distinct characters, so that stop strings match, overlap and nearly match all the time.
texts = st.text(alphabet="abé😀", max_size=24)
broken = st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"\xed", b"\xa0", b"\xff"]))
answers = st.one_of(texts.map(str.encode), broken.map(b"".join), st.binary(max_size=12))
stop_lists = st.lists(st.text(alphabet="abé😀" + BROKEN, min_size=1, max_size=5), max_size=4)


def split(data, cuts):
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


cuts = st.lists(st.integers(0, 60), max_size=20)


@settings(max_examples=1000, deadline=None)
@given(answers, stop_lists, cuts, st.booleans())
def test_any_split_into_tokens_gives_the_text_that_the_whole_gives(data, stops, places, cut):
    _, joined, stopped = assemble(split(data, places), stops, cut=cut)

    assert (joined, stopped) == expected(data, stops, cut=cut)


@settings(max_examples=300, deadline=None)
@given(answers, stop_lists, st.randoms(use_true_random=False))
def test_the_order_of_the_stop_strings_does_not_matter(data, stops, random):
    shuffled = random.sample(stops, len(stops))

    assert assemble([data], shuffled)[1:] == assemble([data], stops)[1:]


@settings(max_examples=500, deadline=None)
@given(answers, stop_lists, cuts)
def test_nothing_that_was_given_out_is_taken_back(data, stops, places):
    """At every moment the text so far is the beginning of every text that can still come."""
    streamed, joined, _ = assemble(split(data, places), stops)

    so_far = ""
    for text in streamed:
        so_far += text
        assert joined.startswith(so_far)
        assert not any(stop in so_far for stop in stops)


@settings(max_examples=300, deadline=None)
@given(texts, stop_lists)
def test_no_more_is_held_back_than_could_begin_a_stop_string(answer, stops):
    text = TextAssembler(tuple(stops))
    given_out = ""
    for at, character in enumerate(answer, 1):
        given_out += text.push(character.encode())
        if text.stopped:
            return
        held = answer[len(given_out) : at]
        assert held == "" or any(stop.startswith(held) or stop in held for stop in stops)
        assert len(held) < max(map(len, stops), default=1)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC"),
        (["Par", "is."], ["Pari"], ""),
        (["Paris."], ["s.", "is"], "Par"),
        (["Paris."], ["is", "s."], "Par"),
        (["P", "a", "r", "i", "s", "."], ["s.", "is"], "Par"),
        (["stop", "more"], ["stop"], ""),
        (["abcx"], ["abcd", "bc"], "a"),
        (["a", "b", "c", "d"], ["abcd", "bc"], ""),
        (["aaab"], ["aab"], "a"),
    ],
)
def test_the_text_ends_at_the_earliest_match(pieces, stops, text):
    streamed, joined, stopped = assemble([piece.encode() for piece in pieces], stops)

    assert joined == text
    assert stopped
    assert "".join(streamed) == text


def test_a_match_at_the_very_end_counts_though_an_earlier_one_could_have_grown():
    assert assemble([b"abc"], ["abcd", "bc"], cut=True)[1:] == ("a", True)


def test_what_looked_like_a_stop_string_comes_out_when_it_is_none():
    assert assemble([b"ab", b"c", b"x"], ["abcd"])[0] == ["", "", "abcx", ""]
    assert assemble([b"ab", b"c"], ["abcd"])[0] == ["", "", "abc"]


def test_without_stop_strings_nothing_is_held_back():
    assert assemble([b"one", b" two"])[0] == ["one", " two", ""]


def test_a_character_over_several_tokens_comes_when_it_is_whole():
    assert assemble([b"\xf0", b"\x9f", b"\x98", b"\x80!"])[0] == ["", "", "", "😀!", ""]


@pytest.mark.parametrize("half", [b"\xc3", b"\xe2\x82", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xf4\x8f"])
def test_a_character_cut_by_a_limit_is_dropped_and_one_cut_by_the_model_is_replaced(half):
    assert assemble([b"ok", half], cut=True)[1] == "ok"
    assert assemble([b"ok", half], cut=False)[1] == "ok" + BROKEN


@pytest.mark.parametrize(("broken", "count"), [(b"\xff", 1), (b"\xa9", 1), (b"\xed\xa0", 2), (b"\xc0", 1)])
def test_bytes_that_can_never_become_a_character_are_replaced_even_at_a_limit(broken, count):
    assert assemble([b"ok", broken], cut=True)[1] == "ok" + BROKEN * count


def test_a_broken_character_does_not_swallow_the_next_one():
    assert assemble([b"\xe2\x82", b"A"])[1] == BROKEN + "A"
    assert assemble([b"\xe2\x82", b"\xe2\x82\xac"])[1] == BROKEN + "€"
