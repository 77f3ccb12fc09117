"""The machine's own memory: what control groups leave, and whose bytes are whose."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from probing import Holder

import slimproc
from slimproc.residency.ledger import Ledger
from slimproc.residency.probes import cgroup, processes
from slimproc.residency.probes.__main__ import FrontGone, run
from slimproc.residency.probes.host import sample_host
from slimproc.residency.probes.nvml import Reading
from slimproc.residency.probes.shares import Shares
from slimproc.residency.sampler import Sampler
from slimproc.residency.views import HOST, Claim, Sample

MIB, GIB = 1 << 20, 1 << 30
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


@pytest.fixture
def root(tmp_path):
    """A machine of 16 GiB, of which 8 are free, with no control group."""
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(text))


def write_v2(root, path, group):
    for name, value in group.items():
        write(root / "sys/fs/cgroup" / path / name, value)


def host(root, leaders=(), limit=None):
    return sample_host(leaders, limit, root=root)


# --- what there is -------------------------------------------------------------------------------------------


def test_free_counts_what_could_be_had_without_swapping(root):
    seen = host(root)
    assert (seen.kind, seen.total, seen.free) == ("host", 16 * GIB, 8 * GIB)


def test_an_old_kernel_only_says_what_is_free(root):
    write(root / "proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1048576 kB\n")
    assert host(root).free == GIB


@linux
@pytest.mark.parametrize("text", [None, "", "MemTotal: kB\n", "Nothing: 1 kB\n"])
def test_without_meminfo_the_system_is_asked_directly(tmp_path, text):
    if text is not None:
        write(tmp_path / "proc/meminfo", text)
    seen = host(tmp_path)
    assert 0 < seen.free <= seen.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_control_group_limits_total_and_free(root):
    write(root / "proc/self/cgroup", "0::/system.slice/slimproc.service\n")
    write_v2(root, "system.slice/slimproc.service", {"memory.max": 4 * GIB, "memory.current": GIB})
    seen = host(root)
    assert (seen.total, seen.free) == (4 * GIB, 3 * GIB)


def test_the_page_cache_of_a_group_counts_as_free_where_it_can_go(root):
    write(root / "proc/self/cgroup", "0::/a\n")
    write_v2(
        root,
        "a",
        {
            "memory.max": 4 * GIB,
            "memory.current": 3 * GIB,
            "memory.stat": f"anon {GIB}\nfile {2 * GIB}\nshmem 0\nactive_file {MIB}\ninactive_file {2 * GIB - MIB}\n",
        },
    )
    assert host(root).free == 3 * GIB


def test_in_a_group_a_model_file_that_is_in_use_is_taken_off_once_and_not_twice(root):
    """A group of 8 GiB: 4 of a mapped file that is read again and again, and so active, and 1 private."""
    write(root / "proc/self/cgroup", "0::/a\n")
    stat = f"anon {GIB}\nfile {5 * GIB}\nshmem {GIB}\nactive_anon {GIB}\nactive_file {4 * GIB}\ninactive_file 0\n"
    write_v2(root, "a", {"memory.max": 8 * GIB, "memory.current": 6 * GIB, "memory.stat": stat})
    ledger = Ledger(0, 5.0)
    ledger.hold("a/0", HOST, Claim(GIB, GIB, file="/model.gguf", file_bytes=4 * GIB), now=1.0)
    ledger.attach("a/0", 7)
    seen = replace(host(root), attributed={7: GIB}, mapped={7: 4 * GIB})
    ledger.observe(Sample(2.0, {HOST: seen}))
    assert seen.free == 6 * GIB, "shared memory cannot be dropped"
    assert ledger.view(HOST, 2.0).available == 2 * GIB


def test_the_tightest_of_all_groups_around_us_counts(root):
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    write_v2(root, "outer", {"memory.max": 6 * GIB, "memory.current": 5 * GIB})
    write_v2(root, "outer/inner", {"memory.max": "max", "memory.high": 5 * GIB, "memory.current": 2 * GIB})
    seen = host(root)
    assert (seen.total, seen.free) == (5 * GIB, GIB)


@pytest.mark.parametrize("path", ["/", "/docker/0123456789", "/../../outside"])
def test_in_a_container_the_root_that_it_sees_is_its_group(root, path):
    write(root / "proc/self/cgroup", f"0::{path}\n")
    write_v2(root, "", {"memory.max": 2 * GIB, "memory.current": GIB})
    assert host(root).total == 2 * GIB


def test_the_first_version_of_control_groups_counts_as_well(root):
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    box = root / "sys/fs/cgroup/memory/box"
    write(box / "memory.limit_in_bytes", 3 * GIB)
    write(box / "memory.usage_in_bytes", 2 * GIB)
    write(
        box / "memory.stat",
        f"active_file 3\ninactive_file 5\ntotal_active_file {GIB // 4}\ntotal_inactive_file {3 * GIB // 4}\n",
    )
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", 12 * GIB)
    seen = host(root)
    assert (seen.total, seen.free) == (3 * GIB, 2 * GIB)


@pytest.mark.parametrize("text", ["", "garbage\n", "0::\n", ":::\n", "0::/a\n"])
def test_a_machine_whose_groups_say_nothing_has_no_limit(root, text):
    write(root / "proc/self/cgroup", text)
    write_v2(root, "a", {"memory.max": "max", "memory.current": "?"})
    assert cgroup.limits(root) == []
    assert host(root).total == 16 * GIB


def test_a_group_over_its_limit_has_nothing_free(root):
    write(root / "proc/self/cgroup", "0::/a\n")
    write_v2(root, "a", {"memory.max": GIB, "memory.current": 2 * GIB})
    assert host(root).free == 0


# --- whose it is ---------------------------------------------------------------------------------------------


@linux
def test_a_groups_private_bytes_and_its_mapped_file_are_told_apart(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(48 * MIB))
    with Holder(64, file) as holder, Holder() as empty:
        seen = sample_host([holder.leader, empty.leader], None)
    private = seen.attributed[holder.leader] - seen.attributed[empty.leader]
    mapped = seen.mapped[holder.leader] - seen.mapped[empty.leader]
    assert 60 * MIB < private < 80 * MIB
    assert 44 * MIB < mapped < 60 * MIB


@linux
def test_memory_that_processes_share_without_a_file_is_private(tmp_path):
    code = "import mmap; m = mmap.mmap(-1, 64 << 20); m.write(b'x' * (64 << 20)); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stdout.readline()
        assert sample_host([process.pid], None).attributed[process.pid] > 64 * MIB
        process.communicate(b"\n")


WORKERS = """
import mmap, os, sys
kept = b"x" * (150 << 20)
shared = mmap.mmap(-1, 50 << 20)
shared.write(b"y" * (50 << 20))
file = open(sys.argv[1], "rb")
weights = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(weights[::4096])
for _ in range(3):
    ready, told = os.pipe()
    if not os.fork():
        sum(shared[::4096]) + sum(weights[::4096])
        os.write(told, b"1")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
print(1, flush=True)
sys.stdin.read()
"""


@linux
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell shares")
def test_what_the_workers_of_a_server_share_counts_once(tmp_path):
    """150 MiB that were there before the forks, 50 of shared memory and a file of 100: all four have them all."""
    (tmp_path / "weights").write_bytes(bytes(100 * MIB))
    with subprocess.Popen(
        [sys.executable, "-c", WORKERS, str(tmp_path / "weights")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        process.stdout.readline()
        seen = sample_host([process.pid], None)
        sampler = Sampler(lambda _: None, environ={})
        sampler.watch([process.pid])
        unasked = sampler.sample_now().devices[HOST]
        sampler.latest = Sample(1.0, {HOST: seen})
        told = sampler.sample_now().devices[HOST]
        process.communicate(b"")
    assert 200 * MIB <= seen.attributed[process.pid] < 270 * MIB
    assert 90 * MIB < seen.mapped[process.pid] < 160 * MIB
    assert 200 * MIB <= unasked.attributed[process.pid] < 270 * MIB, "the front does not ask, and counts nothing twice"
    assert told.attributed == seen.attributed


@linux
def test_grandchildren_belong_to_their_leader():
    with Holder() as holder:
        trees = processes.read([holder.leader], Shares().of_tree)
    assert trees.leader_of == {holder.leader: holder.leader, holder.child: holder.leader}


def test_who_is_gone_has_nothing():
    with Holder() as holder:
        pass
    seen = sample_host([holder.leader], None)
    assert (seen.attributed, seen.mapped) == ({}, {})


def test_without_leaders_no_process_is_looked_at(monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("a folder was listed"))
    assert sample_host([], None).attributed == {}


def test_where_there_is_no_proc_psutil_finds_the_same_processes():
    with Holder(64) as holder, Holder() as empty:
        trees = processes.read_with_psutil([holder.leader, empty.leader, 1 << 22])
    assert trees.leader_of[holder.child] == holder.leader
    assert set(trees.bytes) == {holder.leader, empty.leader}
    assert 60 * MIB < trees.bytes[holder.leader].private - trees.bytes[empty.leader].private < 80 * MIB


# --- host_limit ----------------------------------------------------------------------------------------------


def test_the_configured_limit_is_a_bound_on_what_is_ours(root):
    with Holder(64) as holder:
        ours = sample_host([holder.leader], None, root=root).attributed[holder.leader]
        seen = host(root, [holder.leader], 256 * MIB)
    assert seen.total == 256 * MIB
    assert abs(seen.free - (256 * MIB - ours)) < 8 * MIB


def test_the_configured_limit_does_not_add_memory_that_is_not_there(root):
    seen = host(root, limit=64 * GIB)
    assert (seen.total, seen.free) == (16 * GIB, 8 * GIB)


def test_more_than_the_configured_limit_leaves_nothing(root):
    with Holder(64) as holder:
        assert host(root, [holder.leader], 16 * MIB).free == 0


# --- what the front loads ------------------------------------------------------------------------------------


def test_the_front_samples_the_host_without_loading_the_driver_or_psutil():
    code = f"""
import sys
import slimproc.residency.sampler
from slimproc.residency.probes.host import sample_host
assert sample_host([1], None).kind == "{HOST}"
print([name for name in ("pynvml", "psutil", "slimproc.residency.probes.nvml") if name in sys.modules])
"""
    package = str(Path(slimproc.__file__).parents[1])
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == ("[]\n" if sys.platform == "linux" else "['psutil']\n")


# --- when a sample is due ------------------------------------------------------------------------------------


class HastyFront:
    """Changes whom to watch right after the first sample, and is gone at the second."""

    takes = True

    def __init__(self):
        self.leaders = frozenset()
        self.waits = []
        self.lines = 0

    def write(self, line):
        self.lines += 1
        if self.lines == 2:
            raise FrontGone

    def hear(self, seconds):
        self.waits.append(seconds)
        self.leaders = frozenset([os.getpid()])
        return len(self.waits) == 1


class NoGpus:
    def sample(self, trees, host):
        return Reading(driver="absent")


def test_a_change_of_whom_to_watch_brings_a_sample_at_once():
    front = HastyFront()
    with pytest.raises(FrontGone):
        run(front, NoGpus(), None)
    first, *others = front.waits
    assert 0.25 < first <= 1.0, "nobody was watched, and there is no GPU"
    assert max(others, default=0.0) <= 0.02
