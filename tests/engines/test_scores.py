"""Log probabilities of a sequence: each goes out with the text of its token, and none that JSON cannot write."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from slimproc.engines.scores import FLOOR, LONGEST_ALTERNATIVE, LONGEST_PIECE, Score
from slimproc.engines.sequence import Sequence
from slimproc.ipc.joined import logprob_bytes
from slimproc.ipc.region import MIN_CAPACITY
from slimproc.ipc.wire import ScoredTok, Submit, encode
from slimproc.request import Finish

SMALLEST_FRAME = MIN_CAPACITY // 8


class Heard:
    """What the front hears of a sequence that gives ``pieces``, item by item."""

    def __init__(self, *pieces: bytes, end: bool = True, top: int = 0, **command: object) -> None:
        self.sequence = Sequence(Submit(rid=1, prompt="p", logprobs=top, **command), [1], 10_000)
        self.items: list[ScoredTok] = []
        for place, piece in enumerate(pieces):
            if self.items and self.items[-1].finish:
                break
            last = end and place == len(pieces) - 1
            self.items += self.sequence.advance_scored(Score(piece, -float(place), []), last)

    @property
    def by_item(self) -> list[tuple[str, list[bytes]]]:
        return [(item.text, [one.piece for one in item.logprobs]) for item in self.items]

    @property
    def offsets(self) -> list[tuple[bytes, int]]:
        return [(one.piece, one.offset) for item in self.items for one in item.logprobs]


def test_each_token_comes_with_its_own_text():
    heard = Heard(b"a", b"bc", b" d")
    assert heard.by_item == [("a", [b"a"]), ("bc", [b"bc"]), (" d", [b" d"])]
    assert [one.logprob for item in heard.items for one in item.logprobs] == [0.0, -1.0, -2.0]
    assert heard.offsets == [(b"a", 0), (b"bc", 1), (b" d", 3)]


def test_the_models_end_is_no_token():
    heard = Heard(b"a", b"")
    assert heard.by_item == [("a", [b"a"]), ("", [])]
    assert heard.items[-1].usage.completion_tokens == 1


def test_parts_of_a_character_come_together_and_begin_where_it_begins():
    heard = Heard(b"x\xf0\x9f", b"\x99", b"\x82", b"y")
    assert heard.by_item == [("x", [b"x\xf0\x9f"]), ("🙂", [b"\x99", b"\x82"]), ("y", [b"y"])]
    assert heard.offsets == [(b"x\xf0\x9f", 0), (b"\x99", 1), (b"\x82", 1), (b"y", 2)]


def test_a_token_without_text_comes_with_what_follows_it():
    assert Heard(b"a", b"", b"b", b"c").by_item == [("a", [b"a"]), ("b", [b"", b"b"]), ("c", [b"c"])]


def test_text_that_waits_for_a_stop_string_keeps_its_tokens_until_it_goes_out():
    heard = Heard(b"a<", b"s", b"t", b"x", b"y", stop=("<stop>",))
    assert heard.by_item == [("a", [b"a<"]), ("<stx", [b"s", b"t", b"x"]), ("y", [b"y"])]


def test_tokens_behind_a_stop_string_are_not_reported_and_one_that_reaches_into_it_is():
    heard = Heard(b"a", b"b<", b"st", b"op>", b"never", stop=("<stop>",))
    assert heard.by_item == [("a", [b"a"]), ("b", [b"b<"]), ("", [])]
    assert heard.items[-1].finish == Finish.STOP
    assert heard.items[-1].usage.completion_tokens == 4


def test_a_limit_in_the_middle_of_a_character_or_of_a_possible_stop_string_keeps_every_token():
    assert Heard(b"a", b"\xf0\x9f", max_tokens=2).by_item == [("a", [b"a"]), ("", [b"\xf0\x9f"])]
    assert Heard(b"a<", b"s", max_tokens=2, stop=("<st",)).by_item == [("a", [b"a<"]), ("<s", [b"s"])]


@pytest.mark.parametrize("bad", [-math.inf, math.nan, -1e30])
def test_what_json_cannot_write_becomes_the_floor(bad):
    sequence = Sequence(Submit(rid=1, prompt="p", logprobs=2), [1], 100)
    (item,) = sequence.advance_scored(Score(b"a", bad, [(b"b", -0.5), (b"c", bad)]), False)
    (one,) = item.logprobs
    assert (one.logprob, one.top) == (FLOOR, [(b"b", -0.5), (b"c", FLOOR)])


def test_rounding_never_makes_a_log_probability_positive():
    sequence = Sequence(Submit(rid=1, prompt="p", logprobs=0), [1], 100)
    (item,) = sequence.advance_scored(Score(b"a", 1e-7, []), False)
    assert item.logprobs[0].logprob == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_pieces_cut_anywhere_lose_no_token_and_keep_their_order(seed):
    dice = random.Random(seed)
    data = "".join(dice.choices(["a", "<", "<st", "é", "🙂", "\ufffd"], k=60)).encode() + b"\xf0\x9f"
    cuts = sorted(dice.sample(range(1, len(data)), 30))
    pieces = [data[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(data)])]
    heard = Heard(*pieces, stop=("<stop>",))
    text = "".join(item.text for item in heard.items)
    assert text == data.decode("utf-8", "replace")
    assert [piece for piece, _ in heard.offsets] == pieces
    done = 0
    for item in heard.items:
        assert all(done <= one.offset <= done + len(item.text) for one in item.logprobs)
        done += len(item.text)
    whole = [len(data[:at].decode("utf-8", "ignore")) for at in [0, *cuts]]
    assert [offset for _, offset in heard.offsets] == whole


# --- many at once -------------------------------------------------------------------------------------------------


def test_many_tokens_that_were_held_together_go_out_in_items_of_bounded_size():
    stop = "x" * 900 + "!"
    alternatives = [(b"alternative %d" % place, -1.0) for place in range(20)]
    sequence = Sequence(Submit(rid=1, prompt="p", logprobs=20, stop=(stop,)), [1], 10_000)
    for _ in range(500):
        assert sequence.advance_scored(Score(b"x", -1.0, alternatives), False) == []
    items = sequence.advance_scored(Score(b"y", -1.0, alternatives), False)
    assert len(items) > 100
    assert sum(item.tokens for item in items) == 501
    assert "".join(item.text for item in items) == "x" * 500 + "y"
    for item in items:
        assert item.text == b"".join(one.piece for one in item.logprobs).decode()
        assert sum(map(logprob_bytes, item.logprobs)) <= SMALLEST_FRAME // 2


def test_the_largest_token_with_alternatives_fits_half_of_the_smallest_frame():
    sequence = Sequence(Submit(rid=2**64 - 1, prompt="p", logprobs=20), [1], 10_000)
    (item,) = sequence.advance_scored(Score(b"x" * 5000, -0.1, [(b"y" * 5000, -0.1)] * 20), False)
    (one,) = item.logprobs
    assert (len(one.piece), len(one.top[0][0])) == (LONGEST_PIECE, LONGEST_ALTERNATIVE)
    assert len(encode(one)) <= logprob_bytes(one) <= SMALLEST_FRAME // 2
    assert item.text == "x" * 5000


# --- echo ---------------------------------------------------------------------------------------------------------


def echoed(text: str, pieces: list[bytes], **command: object) -> tuple[Sequence, list[ScoredTok]]:
    sequence = Sequence(Submit(rid=1, prompt=text, echo=True, logprobs=0, **command), [1] * len(pieces), 10_000)
    sequence.echo_text = text
    scores = [Score(piece, None if place == 0 else -1.0, []) for place, piece in enumerate(pieces)]
    return sequence, sequence.echo_scored(scores, last=True)


def test_an_echo_has_every_token_and_the_answer_goes_on_behind_it():
    sequence, (echo,) = echoed("hé!", [b"h", b"\xc3", b"\xa9", b"!"])
    assert (echo.text, echo.tokens, echo.finish) == ("hé!", 0, Finish.RUNNING)
    assert [(one.piece, one.logprob, one.offset) for one in echo.logprobs] == [
        (b"h", None, 0), (b"\xc3", -1.0, 1), (b"\xa9", -1.0, 1), (b"!", -1.0, 2),
    ]  # fmt: skip
    (first,) = sequence.advance_scored(Score(b"x", -2.0, []), False)
    assert [(one.piece, one.offset) for one in first.logprobs] == [(b"x", 3)]


def test_a_bos_that_the_text_did_not_bring_has_no_text():
    _, (echo,) = echoed("ab", [b"<s>", b"a", b"b"])
    assert [(one.piece, one.offset) for one in echo.logprobs] == [(b"", 0), (b"a", 0), (b"b", 1)]
    _, (echo,) = echoed("<s>a", [b"<s>", b"a"])
    assert [(one.piece, one.offset) for one in echo.logprobs] == [(b"<s>", 0), (b"a", 3)]


def test_a_prompt_of_token_ids_may_begin_with_half_a_character():
    _, (echo,) = echoed("\ufffdab", [b"\xdc", b"a", b"b"])
    assert [(one.piece, one.offset) for one in echo.logprobs] == [(b"\xdc", 0), (b"a", 0), (b"b", 2)]


def test_an_echo_may_come_in_parts_each_with_its_own_text():
    sequence = Sequence(Submit(rid=1, prompt="aé🙂b", echo=True, logprobs=0, max_tokens=0), [1], 10)
    sequence.echo_text = "aé🙂b"
    parts = [[(b"a", None), (b"\xc3", -1.0)], [(b"\xa9", -2.0), (b"\xf0\x9f", -3.0)], [(b"\x99\x82b", -4.0)]]
    items = [
        (item.text, [one.piece for one in item.logprobs], [one.offset for one in item.logprobs])
        for place, part in enumerate(parts)
        for item in sequence.echo_scored([Score(*one, []) for one in part], last=place == 2)
    ]
    assert items == [
        ("a", [b"a"], [0]),
        ("é", [b"\xc3", b"\xa9"], [1, 1]),
        ("🙂b", [b"\xf0\x9f", b"\x99\x82b"], [2, 2]),
        ("", [], []),
    ]


def test_an_echo_without_an_answer_ends_with_length():
    _, items = echoed("ab", [b"a", b"b"], max_tokens=0)
    assert [(item.text, item.finish) for item in items] == [("ab", Finish.RUNNING), ("", Finish.LENGTH)]
    assert items[-1].usage.completion_tokens == 0


def test_a_long_echo_is_cut_between_tokens():
    pieces = [b"%04d " % number for number in range(3000)]
    _, items = echoed(b"".join(pieces).decode(), pieces)
    assert len(items) > 10
    for item in items:
        assert item.text == b"".join(one.piece for one in item.logprobs).decode()
    assert [one.piece for item in items for one in item.logprobs] == pieces
