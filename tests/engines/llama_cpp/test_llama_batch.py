"""What goes into a call of the model, and how much of a prompt beside running answers."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from slimproc.engines.llama_cpp.batch import WORTH_A_CALL, Chunk, passes, plan_answers, plan_prompts, single_gaps
from slimproc.engines.prefill import PrefillBudget


def answers(slots, *, room=512, fill=()):
    return plan_answers(slots, room=room, can_fill=set(fill).__contains__)


def test_running_answers_come_sorted_by_slot_whatever_their_age():
    assert answers([3, 1, 2]) == [Chunk(1, 1), Chunk(2, 1), Chunk(3, 1)]


def test_a_single_gap_is_closed_by_a_filler():
    assert answers([0, 2], fill=[1]) == [Chunk(0, 1), Chunk(1, 1, filler=True), Chunk(2, 1)]


def test_a_gap_of_two_is_left_open():
    assert answers([0, 3], fill=[1, 2]) == [Chunk(0, 1), Chunk(3, 1)]


def test_a_gap_stays_open_where_the_slot_cannot_take_a_filler():
    assert answers([0, 2]) == [Chunk(0, 1), Chunk(2, 1)]


def test_prompts_share_the_budget_oldest_first():
    assert plan_prompts([(2, 30), (0, 30), (1, 30)], budget=45, room=512) == [Chunk(0, 15), Chunk(2, 30)]


def test_a_prompt_that_somewhat_more_would_end_is_read_to_its_end():
    assert plan_prompts([(0, 18)], budget=16, room=512) == [Chunk(0, 18)]
    assert plan_prompts([(0, 21)], budget=16, room=512) == [Chunk(0, 16)]
    assert plan_prompts([(0, 18)], budget=16, room=16) == [Chunk(0, 16)]


def test_no_small_piece_of_another_prompt_is_added_that_would_cost_a_pass_of_its_own():
    assert plan_prompts([(0, 10), (1, 30)], budget=17, room=512) == [Chunk(0, 10)]
    assert plan_prompts([(0, 10), (1, 30)], budget=18, room=512) == [Chunk(0, 10), Chunk(1, 8)]
    assert plan_prompts([(0, 10), (1, 3)], budget=13, room=512) == [Chunk(0, 10), Chunk(1, 3)]


def test_the_rest_of_a_prompt_is_not_asked_for_more_than_it_has():
    assert plan_prompts([(0, 7)], budget=100, room=512) == [Chunk(0, 7)]
    assert plan_prompts([], budget=100, room=512) == []


@given(st.sets(st.integers(0, 31)), st.sets(st.integers(0, 31)), st.integers(32, 64))
def test_every_call_for_answers_is_in_order_within_its_limits_and_leaves_none_out(slots, fillable, room):
    chunks = answers(slots, room=room, fill=fillable - slots)
    order = [chunk.slot for chunk in chunks]
    assert order == sorted(set(order))
    assert len(chunks) <= room
    assert {chunk.slot for chunk in chunks if not chunk.filler} == slots
    for chunk in chunks:
        if chunk.filler:
            assert chunk.slot in fillable
            assert {chunk.slot - 1, chunk.slot + 1} <= set(order)


pendings = st.dictionaries(st.integers(0, 31), st.integers(2, 40)).map(lambda slots: list(slots.items()))


@given(pendings, st.integers(1, 64), st.integers(32, 64))
def test_every_call_for_prompts_is_in_order_within_its_limits_and_gets_on(pending, budget, room):
    chunks = plan_prompts(pending, budget=budget, room=room)
    order = [chunk.slot for chunk in chunks]
    assert order == sorted(set(order))
    total = sum(chunk.tokens for chunk in chunks)
    assert min(budget, room, sum(tokens for _, tokens in pending)) - 8 < total <= min(budget + budget // 4, room)
    assert all(1 <= chunk.tokens <= dict(pending)[chunk.slot] for chunk in chunks)
    assert not pending or pending[0][0] in order


@given(st.sets(st.integers(0, 40)))
def test_closing_single_gaps_never_adds_a_pass(slots):
    gaps = single_gaps(dict.fromkeys(slots, 1))
    assert passes(slots | set(gaps)) == passes(slots) - len(gaps)


def test_passes_are_runs_of_consecutive_slots():
    assert [passes(slots) for slots in (set(), {3}, {0, 1, 2}, {0, 2}, {5, 1, 0, 7, 6})] == [0, 1, 1, 2, 2]


# --- how much of a prompt ---------------------------------------------------------------------------------------


class Machine:
    """A model whose passes cost what they read plus what they compute, in seconds."""

    def __init__(self, *, weights=0.004, token=0.002, answer=0.003):
        self.weights, self.token, self.answer = weights, token, answer

    def seconds(self, running, prompt_tokens):
        quiet = self.weights + self.answer * running if running else 0.0
        return quiet + (self.weights + self.token * prompt_tokens if prompt_tokens else 0.0)


def run(budget, machine, running, steps, *, prompt=True):
    for _ in range(steps):
        tokens = budget.tokens(running) if prompt else 0
        budget.observe(running, tokens, machine.seconds(running, tokens))
    return tokens


def test_running_answers_stay_under_three_times_their_quiet_step():
    for machine in (Machine(), Machine(weights=0.02, token=0.0005), Machine(weights=0.0001, token=0.0001)):
        for running in (1, 4, 7, 16):
            budget = PrefillBudget(512)
            run(budget, machine, 0, 5)
            run(budget, machine, running, 20, prompt=False)
            tokens = run(budget, machine, running, 40)
            quiet = machine.seconds(running, 0)
            assert machine.seconds(running, tokens) < 3 * quiet
            assert tokens == 1 or machine.seconds(running, tokens) > 1.8 * quiet, "and the prompt gets on"


def test_where_prompts_have_a_call_of_their_own_both_calls_together_stay_under_three_quiet_ones():
    """Also where a prompt's end makes a call a quarter longer. Beside fewer than 7, a call's pass must be worth it."""
    as_dear_as_answers = Machine(weights=0.0001, token=0.003)
    machines = Machine(), Machine(weights=0.02, token=0.0005), Machine(weights=0.0001, token=0.0001), as_dear_as_answers
    for machine, running in itertools.product(machines, (1, 4, 6, 7, 8, 12, 16)):
        budget = PrefillBudget(512, least=WORTH_A_CALL)
        for _ in range(40):
            tokens = budget.tokens(running)
            budget.observe(running, 0, machine.seconds(running, 0))
            budget.observe_apart(tokens, machine.seconds(0, tokens))
        quiet = machine.seconds(running, 0)
        kept = quiet + machine.seconds(0, tokens + tokens // 4) < 3 * quiet
        assert kept or (running < 7 and tokens <= WORTH_A_CALL)
        assert quiet + machine.seconds(0, tokens) > 1.8 * quiet, "and the prompt gets on"


def test_beside_few_answers_a_call_takes_as_many_tokens_as_make_it_worth_its_pass_unless_they_take_long():
    for token, expected in ((0.01, WORTH_A_CALL), (0.05, 5), (0.5, 3)):
        budget = PrefillBudget(512, least=WORTH_A_CALL)
        for _ in range(40):
            tokens = budget.tokens(1)
            budget.observe(1, 0, 2 * token)
            budget.observe_apart(tokens, token * tokens)
        assert tokens == expected


def test_a_burst_of_short_prompts_comes_before_answers_that_are_fewer_and_a_long_prompt_never_does():
    budget = PrefillBudget(512, least=WORTH_A_CALL)
    assert not budget.comes_first(1, 3, 60), "while nothing is known"
    budget.observe(0, 64, 0.5)
    assert budget.comes_first(1, 3, 60)
    assert budget.comes_first(7, 8, 380)
    assert not budget.comes_first(3, 3, 60)
    assert not budget.comes_first(1, 3, 390), "3 s are all that answers wait"
    assert not budget.comes_first(0, 3, 60)


def test_where_more_wait_for_their_first_token_than_for_their_next_those_come_first_for_a_quarter_of_a_second_at_most():
    budget, machine = PrefillBudget(512), Machine()
    for _ in range(40):
        budget.observe(4, 0, machine.seconds(4, 0))
        budget.observe_apart(16, machine.seconds(0, 16))
    one, four, eight, many = (budget.tokens(4, prompts) for prompts in (1, 4, 8, 1000))
    assert one == four < eight < many
    assert machine.seconds(0, many) < 0.3


def test_prompts_get_on_where_a_quiet_step_never_comes():
    for machine in (Machine(), Machine(weights=0.02, token=0.0005), Machine(weights=0.0001, token=0.0001)):
        for known in (0, 1):
            budget = PrefillBudget(512)
            run(budget, machine, known, 5, prompt=known == 0)
            for running in (7, 16):
                tokens = run(budget, machine, running, 40)
                assert 1.3 < machine.seconds(running, tokens) / machine.seconds(running, 0) < 3


def test_noise_does_not_starve_a_prompt():
    """Each step takes some of another process's time as well, and now and then much of it."""
    budget, machine, chance = PrefillBudget(512), Machine(), random.Random(7)

    def noisy(prompt_tokens):
        return machine.seconds(7, prompt_tokens) + chance.choice([0.0, 0.01, 0.05, 0.2])

    for _ in range(20):
        budget.observe(7, 0, machine.seconds(7, 0))
    for _ in range(100):
        tokens = budget.tokens(7)
        budget.observe(7, tokens, noisy(tokens))
        assert tokens >= 7
        assert machine.seconds(7, tokens) < 3 * machine.seconds(7, 0)


def test_the_first_chunks_beside_answers_are_small_while_nothing_is_known():
    assert PrefillBudget(512, least=WORTH_A_CALL).tokens(3) == WORTH_A_CALL
    assert PrefillBudget(512, least=WORTH_A_CALL).tokens(7) <= 8
    assert PrefillBudget(512).tokens(3) <= 8


def test_alone_a_prompt_gets_whole_blocks_of_at_most_a_quarter_of_a_second():
    budget, machine = PrefillBudget(512), Machine()
    tokens = run(budget, machine, 0, 20)
    assert tokens % 64 == 0
    assert 0.1 < machine.seconds(0, tokens) < 0.3


def test_alone_a_fast_machine_gets_the_whole_batch_and_a_slow_one_no_less_than_a_block_of_64():
    assert run(PrefillBudget(512), Machine(weights=0.0, token=1e-6), 0, 20) == 512
    assert run(PrefillBudget(512), Machine(token=1.0), 0, 20) == 64


def test_one_slow_step_does_not_swell_the_chunks():
    budget, machine = PrefillBudget(512), Machine()
    run(budget, machine, 7, 20, prompt=False)
    before = run(budget, machine, 7, 30)
    budget.observe(7, 0, 10 * machine.seconds(7, 0))
    run(budget, machine, 7, 2, prompt=False)
    assert budget.tokens(7) <= before * 1.5


def test_a_number_of_answers_never_seen_is_judged_by_its_neighbours():
    budget, machine = PrefillBudget(512), Machine()
    run(budget, machine, 0, 5)
    run(budget, machine, 4, 20, prompt=False)
    run(budget, machine, 4, 20)
    assert 1 <= budget.tokens(3) <= budget.tokens(4) == budget.tokens(5)
