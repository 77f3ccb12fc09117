"""The seccomp filter, run by a small interpreter of its language for both architectures, also the one that this is not."""

from __future__ import annotations

import errno
import re
import signal
import socket
import struct
from pathlib import Path

import pytest

from slimproc.engines.confine.seccomp import EXAMINED, REFUSED, make_filter

ALLOW, KILL = "allow", "kill"
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
READ_WRITE, READ_EXECUTE, ALL = 3, 5, 7


def judge(machine: str, call: str | int, *arguments: int, jit: bool = False, arch: int | None = None) -> str:
    """``allow``, ``kill``, or the name of the error that a call gets."""
    number = call if isinstance(call, int) else (REFUSED | EXAMINED)[call][list(MACHINES).index(machine)]
    padded = [value & (1 << 64) - 1 for value in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number, arch or MACHINES[machine], 0, *padded)
    verdict = _run(make_filter(machine, jit=jit), data)
    match verdict & 0xFFFF0000:
        case 0x7FFF0000:
            return ALLOW
        case 0x80000000:
            return KILL
        case 0x00050000:
            return errno.errorcode[verdict & 0xFFFF]
    raise AssertionError(f"no such verdict: {verdict:#x}")


def _run(program: list[tuple[int, int, int, int]], data: bytes) -> int:
    value = place = 0
    while True:
        code, if_so, if_not, operand = program[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                value &= operand
            case 0x15:
                place += if_so if value == operand else if_not
            case 0x35:
                place += if_so if value >= operand else if_not
            case 0x45:
                place += if_so if value & operand else if_not
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no such instruction: {code:#x}")


both = pytest.mark.parametrize("machine", MACHINES)
levels = pytest.mark.parametrize("jit", [False, True])


@both
@levels
def test_every_call_of_the_list_is_refused_and_its_neighbours_are_not(machine, jit):
    column = list(MACHINES).index(machine)
    refused = {numbers[column] for numbers in REFUSED.values()}
    examined = {numbers[column] for numbers in EXAMINED.values()}
    for number in range(463):
        if number not in examined:
            assert judge(machine, number, jit=jit) == ("EPERM" if number in refused else ALLOW)


@both
@levels
def test_what_is_newer_than_the_list_or_of_another_kind_does_not_exist(machine, jit):
    assert judge(machine, 463, jit=jit) == "ENOSYS"
    assert judge(machine, 0x40000000, jit=jit) == "ENOSYS"
    assert judge(machine, "clone3", jit=jit) == "ENOSYS"
    assert judge(machine, 0, arch=0x40000003, jit=jit) == KILL


@both
@levels
def test_processes_and_threads_may_start_but_not_in_namespaces(machine, jit):
    threads = 0x3D0F00
    assert judge(machine, "clone", threads, jit=jit) == ALLOW
    assert judge(machine, "clone", int(signal.SIGCHLD), jit=jit) == ALLOW
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(machine, "clone", threads | namespace, jit=jit) == "EPERM"


@both
def test_strictly_nothing_may_become_code_and_jit_may(machine):
    for call, argument in (("mmap", ALL), ("mprotect", READ_EXECUTE), ("mprotect", ALL), ("pkey_mprotect", ALL)):
        assert judge(machine, call, 0, 4096, argument) == "EPERM"
        assert judge(machine, call, 0, 4096, argument, jit=True) == ALLOW
    for call, argument in (("mmap", READ_WRITE), ("mmap", READ_EXECUTE), ("mprotect", READ_WRITE), ("mprotect", 0)):
        assert judge(machine, call, 0, 4096, argument) == ALLOW


@both
def test_no_socket_is_opened_strictly_and_only_unix_ones_by_jit(machine):
    for family in (socket.AF_INET, socket.AF_INET6, 16, 17, 40):
        assert judge(machine, "socket", family) == judge(machine, "socket", family, jit=True) == "EPERM"
    assert judge(machine, "socket", socket.AF_UNIX) == judge(machine, "connect", 3) == "EPERM"
    assert judge(machine, "socket", socket.AF_UNIX, jit=True) == judge(machine, "connect", 3, jit=True) == ALLOW


@both
@levels
def test_only_its_own_limits_and_pages_are_its_business(machine, jit):
    for call in ("prlimit64", "move_pages", "migrate_pages"):
        assert judge(machine, call, 0, jit=jit) == ALLOW
        assert judge(machine, call, 4321, jit=jit) == "EPERM"


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_the_kernels_headers(machine, header):
    if not Path(header).exists():
        pytest.skip(f"there is no {header} (Debian: apt-get install linux-libc-dev)")
    text = Path(header).read_text()
    known = {
        name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", text, re.MULTILINE)
    }
    column = list(MACHINES).index(machine)
    for name, numbers in (REFUSED | EXAMINED).items():
        assert numbers[column] == known.get(name), name
