"""Shares of memory that several processes have: what is asked of the kernel, how often, and what is believed meanwhile."""

import pytest

from slimproc.residency.probes.shares import NOTICEABLE, Bytes, Shares, doubtful

MIB = 1 << 20


class Kernel:
    """A /proc in which asking takes time, and a clock that says so."""

    def __init__(self, path):
        self.path = path
        self.now = 0.0
        self.takes = 0.0
        self.asked = []

    def has(self, pid, *, private, mapped=0, text=None):
        folder = self.path / str(pid)
        folder.mkdir(exist_ok=True)
        rows = f"Pss_Anon: {private >> 10} kB\nPss_Shmem: 0 kB\nPss_File: {mapped >> 10} kB\n"
        (folder / "smaps_rollup").write_text("0-1 ---p 0 00:00 0 [rollup]\n" + rows if text is None else text)

    def __truediv__(self, pid):
        self.asked.append(int(pid))
        self.now += self.takes
        return self.path / pid

    def clock(self):
        return self.now


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


@pytest.fixture
def shares(kernel):
    return Shares(proc=kernel, clock=kernel.clock)


def tree(*pids, private=100 * MIB, mapped=0):
    return {pid: Bytes(private, mapped) for pid in pids}


def test_little_that_may_be_shared_and_a_process_alone_are_not_looked_into():
    assert not doubtful({})
    assert not doubtful(tree(1, private=1 << 40))
    assert not doubtful({1: Bytes(1 << 40, 0), 2: Bytes(NOTICEABLE // 2, NOTICEABLE // 2)})
    assert doubtful({1: Bytes(1 << 40, 0), 2: Bytes(NOTICEABLE, 1)})


def test_each_process_counts_with_its_share(kernel, shares):
    kernel.has(1, private=40 * MIB, mapped=5 * MIB)
    kernel.has(2, private=20 * MIB, mapped=5 * MIB)
    assert shares.of_tree(1, tree(1, 2, mapped=10 * MIB)) == Bytes(60 * MIB, 10 * MIB)


@pytest.mark.parametrize(
    "text", ["", "rollup\n", "rollup\nPss_Anon: x kB\n", "rollup\nPss_Anon:\n", "rollup\nPss: 5 kB\n"]
)
def test_of_whom_the_kernel_says_nothing_all_counts(kernel, shares, text):
    kernel.has(1, private=0, text=text)
    assert shares.of_tree(1, tree(1, 2)) == Bytes(200 * MIB, 0)


def test_a_share_is_believed_for_a_while_and_follows_what_the_process_has_meanwhile(kernel, shares):
    kernel.has(1, private=50 * MIB)
    kernel.has(2, private=50 * MIB)
    shares.of_tree(1, tree(1, 2))
    kernel.now += 4.0
    assert shares.of_tree(1, tree(1, 2, private=200 * MIB)) == Bytes(200 * MIB, 0)
    assert kernel.asked == [1, 2]
    kernel.now += 2.0
    shares.of_tree(1, tree(1, 2))
    assert kernel.asked == [1, 2, 1, 2]


def test_many_large_processes_are_asked_a_few_a_sample_and_all_in_the_end(kernel, shares):
    kernel.takes = 0.06
    pids = range(1, 8)
    for pid in pids:
        kernel.has(pid, private=25 * MIB)
    assert shares.of_tree(1, tree(*pids)) == Bytes(7 * 25 * MIB, 0), "who was not asked counts like the others"
    assert kernel.asked == [1, 2]
    for _ in range(3):
        shares.of_tree(1, tree(*pids))
    assert kernel.asked == [*pids]


def test_the_more_it_costs_the_more_seldom_it_is_asked(kernel, shares):
    kernel.takes = 2.0
    kernel.has(1, private=50 * MIB)
    shares.of_tree(1, tree(1))
    kernel.now += 39.0
    shares.of_tree(1, tree(1))
    assert kernel.asked == [1]
    kernel.now += 2.0
    shares.of_tree(1, tree(1))
    assert kernel.asked == [1, 1]


def test_a_process_so_large_that_the_answer_would_take_seconds_is_not_asked(kernel, shares):
    kernel.has(1, private=0)
    assert shares.of_tree(1, tree(1, private=33 << 30)) == Bytes(33 << 30, 0)
    assert kernel.asked == []


def test_trees_and_processes_that_are_gone_are_forgotten(kernel, shares):
    kernel.has(1, private=50 * MIB)
    kernel.has(2, private=50 * MIB)
    shares.of_tree(1, tree(1, 2))
    assert shares.of_tree(1, tree(1)) == Bytes(50 * MIB, 0)
    shares.keep(frozenset())
    shares.of_tree(1, tree(1))
    assert kernel.asked == [1, 2, 1]
