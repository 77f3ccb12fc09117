"""Prefix affinity: what a replica is remembered to have read."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from slimproc.admission.affinity import BLOCK, LONGEST, PrefixMemory, chain
from slimproc.request import ChatPrompt


def text(*blocks: str) -> str:
    return "".join(letter * BLOCK for letter in blocks)


def test_a_prompt_has_a_hash_for_each_whole_block():
    assert [len(chain("x" * length)) for length in (0, BLOCK - 1, BLOCK, 3 * BLOCK + 1)] == [0, 0, 1, 3]


def test_prompts_agree_on_as_many_hashes_as_they_have_blocks_in_common():
    one, other = chain(text("a", "b", "c")), chain(text("a", "b", "d"))

    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_a_block_that_comes_again_later_is_another_block():
    once = chain(text("a", "a"))

    assert once[0] != once[1]


def test_a_turn_added_to_a_chat_keeps_its_beginning():
    first = [{"role": "user", "content": text("a", "b")}]
    answer = {"role": "assistant", "content": text("c")}

    before, after = chain(ChatPrompt(first)), chain(ChatPrompt([*first, answer]))

    assert after[: len(before)] == before


def test_token_ids_have_blocks_too():
    assert len(chain(list(range(2 * BLOCK)))) == 2


def test_a_huge_prompt_is_looked_at_only_so_far():
    assert len(chain("x" * (BLOCK * LONGEST * 2))) == LONGEST


def test_the_longest_remembered_beginning_is_found():
    memory = PrefixMemory(slots=2)
    memory.note(chain(text("a", "b", "c")))

    assert memory.longest(chain(text("a", "b", "x"))) == 2
    assert memory.longest(chain(text("a", "b", "c", "d"))) == 3
    assert memory.longest(chain(text("x"))) == 0


def test_as_many_prompts_are_remembered_as_there_are_slots_and_the_oldest_goes_first():
    memory = PrefixMemory(slots=2)
    for letter in "abc":
        memory.note(chain(text(letter)))

    assert [memory.longest(chain(text(letter))) for letter in "abc"] == [0, 1, 1]


def test_a_conversation_that_goes_on_takes_one_place():
    memory = PrefixMemory(slots=2)
    memory.note(chain(text("z")))
    for length in range(1, 5):
        memory.note(chain(text(*"abcd"[:length])))

    assert memory.longest(chain(text("z"))) == 1
    assert memory.longest(chain(text(*"abcd"))) == 4


def test_many_endings_to_one_beginning_take_one_place():
    memory = PrefixMemory(slots=2)
    memory.note(chain(text("z")))
    for ending in "abcd":
        memory.note(chain(text("s", "y", "s", ending)))

    assert memory.longest(chain(text("z"))) == 1
    assert memory.longest(chain(text("s", "y", "s", "d"))) == 4
    assert len(memory) == 2


def test_a_short_beginning_in_common_is_another_prompt():
    memory = PrefixMemory(slots=2)
    memory.note(chain(text("s", "a", "b", "c")))
    memory.note(chain(text("s", "x", "y", "z")))

    assert memory.longest(chain(text("s", "a", "b", "c"))) == 4


@example(["b", "caa", "c", "caa", "caa", "a"], "b", 3)  # one that is known, behind one that it shares half of
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.text("abc", max_size=5), st.integers(1, 4))
def test_what_is_remembered_is_what_was_sent_last(sent: list[str], wanted: str, slots: int):
    memory = PrefixMemory(slots)
    kept: list[str] = []
    for prompt in sent:
        memory.note(chain(text(*prompt)))
        if prompt:
            alike = (known for known in kept if prompt.startswith(known[: (len(known) + 1) // 2]))
            oldest = kept[0] if len(kept) == slots else None
            continued = prompt if prompt in kept else next(alike, oldest)
            if continued is not None:
                kept.remove(continued)
            kept.append(prompt)

    common = [
        next((n for n in range(min(len(known), len(wanted)), 0, -1) if known[:n] == wanted[:n]), 0) for known in kept
    ]
    assert memory.longest(chain(text(*wanted))) == max(common, default=0)
