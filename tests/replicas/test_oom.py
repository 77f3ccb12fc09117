"""A SIGKILL of the kernel's is told from anybody else's by what the kernel has counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimproc.replicas.oom import OomKills

GROUPS = {
    "v2": (
        "0::/system.slice/slimproc.service\n",
        "sys/fs/cgroup/system.slice/slimproc.service/memory.events",
        "oom 9\n",
    ),
    "v1": ("4:memory:/slim\n0::/\n", "sys/fs/cgroup/memory/slim/memory.oom_control", "under_oom 0\n"),
    "v2, in a container": ("0::/../host/path\n", "sys/fs/cgroup/memory.events", "oom 9\n"),
    "no group": ("", "proc/vmstat", "pgfault 12\n"),
}


@pytest.fixture(params=GROUPS)
def counter(tmp_path, request):
    """A machine's counter: call it with how many processes the kernel has ended so far."""
    membership, name, others = GROUPS[request.param]
    for path, text in (("proc/self/cgroup", membership), (name, "")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return lambda count: (tmp_path / name).write_text(f"{others}oom_kill {count}\n")


def test_each_kill_that_the_kernel_has_counted_since_the_start_explains_one_death(tmp_path, counter):
    counter(3)
    kills = OomKills(tmp_path)
    assert not kills.explains_one()
    counter(5)
    assert [kills.explains_one() for _ in range(3)] == [True, True, False]


def test_where_nothing_is_counted_nothing_is_explained(tmp_path):
    assert not OomKills(tmp_path / "nowhere").explains_one()
    assert isinstance(OomKills(Path("/")).explains_one(), bool)
