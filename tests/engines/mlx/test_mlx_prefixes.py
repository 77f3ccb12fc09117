"""Prefixes are evaluated once: after a sequence, beside it, and for the copies of one request; within a limit of bytes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from slimproc.engines.mlx.prefix import PrefixCache
from tests.engines.conformance import PROMPTS

LONG = "You are a helpful assistant. " * 8


def kv(tokens: list[int]) -> list[KVCache]:
    """A cache whose keys are the tokens themselves."""
    layer = KVCache()
    layer.update_and_fetch(*(mx.array(tokens, dtype=mx.float32).reshape(1, 1, -1, 1) for _ in range(2)))
    return [layer]


def held(cache: list[KVCache]) -> list[int]:
    return [int(value) for value in cache[0].keys_and_values()[0].reshape(-1).tolist()]


SIZE = kv([1])[0].nbytes


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [([1, 2, 3, 4, 5], 4), ([1, 2, 3, 4], 3), ([1, 2, 9], 2), ([1], 0), ([9, 1, 2], 0), ([1, 2, 3], 2)],
)
def test_the_longest_beginning_is_lent_and_at_least_one_token_left(prompt, shared):
    prefixes = PrefixCache(10 * SIZE)
    prefixes.keep([1, 2, 3, 4], kv([1, 2, 3, 4]))
    lent = prefixes.lend(prompt)
    assert prefixes.longest(prompt) == shared
    assert (lent is None) if shared == 0 else (lent[1], held(lent[0])) == (shared, prompt[:shared])


def test_what_is_lent_is_a_copy():
    prefixes = PrefixCache(10 * SIZE)
    prefixes.keep([1, 2, 3], kv([1, 2, 3]))
    lent, _ = prefixes.lend([1, 2, 9])
    lent[0].update_and_fetch(*(mx.full((1, 1, 1, 1), 77.0) for _ in range(2)))
    assert held(lent) == [1, 2, 77]
    again, _ = prefixes.lend([1, 2, 3, 4])
    assert held(again) == [1, 2, 3]


def test_a_longer_text_takes_the_place_of_its_beginning_and_a_shorter_one_is_not_kept():
    prefixes = PrefixCache(10 * SIZE)
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3], [1]):
        prefixes.keep(tokens, kv(tokens))
    assert (len(prefixes), prefixes.longest([1, 2, 3, 4])) == (1, 3)


def test_the_one_unused_for_longest_goes_when_the_bytes_are_full():
    prefixes = PrefixCache(3 * SIZE)
    for first in (10, 20, 30):
        prefixes.keep([first, 1], kv([first, 1]))
    prefixes.lend([10, 1, 5])
    prefixes.keep([40, 1], kv([40, 1]))
    assert [prefixes.longest([first, 1, 2]) for first in (10, 20, 30, 40)] == [2, 0, 2, 2]
    assert prefixes.size == 3 * SIZE


def test_what_is_larger_than_the_limit_is_not_kept():
    prefixes = PrefixCache(SIZE - 1)
    prefixes.keep([1, 2], kv([1, 2]))
    assert (len(prefixes), prefixes.size) == (0, 0)


def test_a_state_that_cannot_go_back_is_lent_only_to_what_goes_on_from_it():
    prefixes = PrefixCache(1 << 20)
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 4))
    prefixes.keep([1, 2, 3], [state])
    assert [prefixes.longest(prompt) for prompt in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 9])] == [3, 0, 0]


def test_a_prompt_like_one_that_is_answering_is_not_evaluated_again(open_mlx, random_model):
    alone = open_mlx(random_model, context=1024).complete(LONG + "beta", 20).text
    engine = open_mlx(random_model, context=1024)
    first = engine.submit(LONG + "alpha", 60, ignore_eos=True)
    engine.until_generating(first)
    second = engine.complete(LONG + "beta", 20)
    assert not first.ended
    assert second.usage.cached_tokens == len(engine.tokens(LONG))
    assert second.text == alone
    engine.finish()
    assert first.text == open_mlx(random_model, context=1024).complete(LONG + "alpha", 60, ignore_eos=True).text


def test_copies_of_one_prompt_wait_for_the_first_to_evaluate_it(open_mlx, random_model):
    engine = open_mlx(random_model, context=1024)
    copies = [engine.submit(LONG, 10, temperature=1.0, seed=seed) for seed in range(4)]
    engine.finish()
    prompt = len(engine.tokens(LONG))
    assert [copy.usage.cached_tokens for copy in copies] == [0, *[prompt - 1] * 3]
    again = open_mlx(random_model, context=1024)
    assert [copy.text for copy in copies] == [
        again.complete(LONG, 10, temperature=1.0, seed=seed).text for seed in range(4)
    ]


def test_those_who_wait_for_a_prompt_go_on_when_it_is_cancelled(open_mlx, random_model):
    engine = open_mlx(random_model, context=1024)
    first, second = (engine.submit(LONG * 3, 5) for _ in range(2))
    engine.step()
    engine.cancel(first)
    engine.finish()
    assert second.usage.cached_tokens > 0, "what the first had evaluated is used"
    assert second.text == open_mlx(random_model, context=1024).complete(LONG * 3, 5).text


def test_a_cancelled_answer_is_a_prefix_as_well(open_mlx, random_model):
    engine = open_mlx(random_model)
    gone = engine.submit(PROMPTS[2], 50, ignore_eos=True)
    engine.until_generating(gone)
    engine.cancel(gone)
    assert engine.complete(PROMPTS[2] + " More", 5).usage.cached_tokens == len(engine.tokens(PROMPTS[2]))


def test_running_answers_go_on_while_a_long_prompt_comes_in(open_mlx, random_model):
    engine = open_mlx(random_model, context=2048)
    running = engine.submit(PROMPTS[0], 400, ignore_eos=True)
    engine.until_generating(running)
    coming = engine.submit("some long prompt " * 100, 5)
    before, steps = running.sequence.generated, 0
    while not coming.sequence.generated:
        engine.step()
        steps += 1
    assert 6 < steps < 120, "the prompt came in pieces, and none of them tiny"
    assert running.sequence.generated - before == steps, "and each step gave the other its token"
