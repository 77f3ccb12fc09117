"""Which slot a prompt takes, and what it finds there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slimproc.engines.llama_cpp.slots import Choice, SlotView, choose_slot
from slimproc.engines.prefix import common_prefix

LONG = list(range(100, 300))


def free(kept=(), used=0):
    return SlotView(busy=False, kept=list(kept), used=used)


def busy(kept=()):
    return SlotView(busy=True, kept=list(kept), used=0)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_where_a_loop_would_stop(one, other):
    expected = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    assert common_prefix(one, other) == expected


def test_empty_slots_are_filled_from_the_lowest():
    assert choose_slot(LONG, [free(), free(), free()]) == Choice(0, 0)
    assert choose_slot(LONG, [busy(), free(), free()]) == Choice(1, 0)


def test_a_hole_between_running_slots_is_filled_first():
    assert choose_slot(LONG, [free(), busy(), free(), busy()]).slot == 2


def test_the_slot_with_the_longest_common_prefix_is_taken_over():
    slots = [free(LONG[:50], 3), free(LONG[:120], 1), free([1, 2, 3], 2)]
    assert choose_slot(LONG, slots) == Choice(1, 120)


def test_one_token_of_a_known_prompt_is_left():
    assert choose_slot(LONG, [free(LONG)]) == Choice(0, len(LONG) - 1)
    assert choose_slot(LONG[:1], [free(LONG)]) == Choice(0, 0)


def test_an_empty_slot_is_preferred_to_spoiling_what_another_keeps():
    other = [*LONG[:20], *range(1000, 1400)]
    assert choose_slot(LONG, [free(other, 1), free()]).slot == 1


def test_without_an_empty_slot_the_one_unused_for_longest_goes():
    assert choose_slot(LONG, [free(range(50), 9), free(range(60), 4), free(range(70), 7)]).slot == 1


def test_a_long_prefix_that_a_running_slot_holds_is_copied_whole():
    assert choose_slot([*LONG, 1, 2], [busy([*LONG, 7]), free()]) == Choice(1, len(LONG), 0)


def test_a_short_common_prefix_is_not_worth_a_copy():
    assert choose_slot(LONG, [busy(LONG[:20]), free()]) == Choice(1, 0)


def test_a_short_common_prefix_does_not_scatter_the_running_slots():
    assert choose_slot(LONG, [busy(), free(), free(), free(LONG[:20], 1)]).slot == 1


def test_a_model_that_cannot_rewind_uses_only_what_the_prompt_continues():
    slots = [free([*LONG[:60], 5], 1), free(LONG[:40], 2)]
    assert choose_slot(LONG, slots, rewinds=False) == Choice(1, 40)
    assert choose_slot(LONG[:40], slots[1:], rewinds=False) == Choice(0, 0)


views = st.lists(
    st.builds(SlotView, st.booleans(), st.lists(st.integers(0, 1), max_size=80), st.integers(0, 9)), min_size=1
).filter(lambda slots: any(not slot.busy for slot in slots))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=90), views, st.booleans())
def test_a_choice_is_free_and_what_it_promises_is_there(prompt, slots, rewinds):
    choice = choose_slot(prompt, slots, rewinds=rewinds)
    assert not slots[choice.slot].busy
    source = slots[choice.slot if choice.copy_from is None else choice.copy_from]
    assert 0 <= choice.cached < len(prompt)
    assert source.kept[: choice.cached] == prompt[: choice.cached]
    assert choice.copy_from != choice.slot
    if not rewinds:
        assert choice.cached in {0, len(source.kept)}
