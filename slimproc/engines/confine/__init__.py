"""Confinement: what an engine gives up between importing its library and opening a model file that nobody vouches for.

A file that takes over the engine can then read that model and our code, talk to the front through what was inherited,
and use the CPU: no other file, network, program, process or kernel door. See docs/confinement.md.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slimproc.engines.confine import kernel, landlock, seccomp

_PR_SET_NO_NEW_PRIVS = 38
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_OF_THE_KERNEL = (
    "/proc/self", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/sys/vm", "/proc/sys/kernel", "/proc/version",
    "/sys/devices", "/sys/fs/cgroup", "/sys/kernel/mm",
)  # fmt: skip
"""CPUs, memory, limits; and of processes only itself: others' environments are in ``/proc``, too."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_DEV = Path("/dev")
_GPU_DEVICES = ("nvidia*", "dri", "kfd", "dxg")
_GPU_READS = (
    "/proc", "/sys", "/usr/share", "/usr/local/cuda", "/opt/rocm", "/run/opengl-driver",
    "/etc/nvidia", "/etc/vulkan", "/etc/OpenCL",
)  # fmt: skip
_SHARD = re.compile(r"(.*-)\d{5}-of-\d{5}\.gguf")


class Confinement(NamedTuple):
    """What was reached: ``strict``, ``jit`` or ``off``, what of it this kernel lacks, and how many threads of the
    library ran already, which Landlock does not reach (seccomp does).
    """

    level: str
    missing: tuple[str, ...] = ()
    early_threads: int = 0

    def __str__(self) -> str:
        lacks = list(self.missing)
        if self.early_threads:
            lacks.append(f"Landlock in {self.early_threads} threads")
        return self.level + (f" (without {', '.join(lacks)})" if lacks else "")


def confine(
    wanted: str, files: Sequence[Path] = (), scratch: Sequence[Path] = (), *, uses_gpu: bool = False
) -> Confinement:
    """Give up what ``wanted`` says (``strict``, ``jit``, ``off``, or ``auto``: jit with a GPU, else strict) for good.

    ``files``: what else may be read; ``scratch``: folders that may be written to. What the kernel lacks is told and
    raises nothing.
    """
    if wanted == "off":
        return Confinement("off")
    if sys.platform != "linux":
        return Confinement("off", ("Linux",))
    jit = wanted == "jit" or (wanted == "auto" and uses_gpu)
    _make_room_for_callbacks()
    missing: list[str] = []
    try:
        kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    except OSError as error:
        return Confinement("off", (f"no_new_privs: {error.strerror}",))
    folders = [*map(str, scratch), *(_drivers_scratch() if jit else ())]
    rules = [*_rules(files), *((path, landlock.WRITE) for path in folders), *(_gpu_rules() if uses_gpu else ())]
    files_held = _restrict_files(rules, missing)
    calls_held = _filter_calls(missing, jit=jit)
    if not files_held and not calls_held:
        return Confinement("off", tuple(missing))
    if not folders:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # where Landlock is missing, files still cannot grow
    return Confinement("jit" if jit else "strict", tuple(missing), _other_threads() if files_held else 0)


def model_files(path: Path) -> list[Path]:
    """What reading the model at ``path`` opens: a directory with what its links lead to, or a file with its shards."""
    try:
        if path.is_dir():
            return [path, *(entry.resolve() for entry in path.iterdir() if entry.is_symlink())]
        shard = _SHARD.fullmatch(path.name)
        if shard is None:
            return [path]
        return [
            entry for entry in path.parent.iterdir() if entry.name.startswith(shard[1]) and _SHARD.fullmatch(entry.name)
        ]
    except (OSError, RuntimeError):  # reading it will say what is wrong
        return [path]


# --- the parts ----------------------------------------------------------------------------------------------------


def _make_room_for_callbacks() -> None:
    """Many builds of libffi write a callback's code into a page of their own. It must be there before pages that are
    written and executed are refused; what is in it then has room for as many callbacks as an engine makes.
    """
    ctypes.CFUNCTYPE(None)(lambda: None)


def _restrict_files(rules: list[tuple[str, int]], missing: list[str]) -> bool:
    try:
        version = landlock.restrict(rules)
    except OSError as error:
        missing.append(f"Landlock: {error.strerror}")
        return False
    if version < landlock.SCOPES_SINCE:
        missing.append(f"rules for signals: Landlock {version}")
    return True


def _filter_calls(missing: list[str], *, jit: bool) -> bool:
    try:
        seccomp.install(jit=jit)
    except OSError as error:
        missing.append(f"seccomp: {error.strerror}")
        return False
    return True


def _rules(files: Sequence[Path]) -> Iterator[tuple[str, int]]:
    mapped = _mapped_files()
    asked_for = (path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path.startswith("/"))
    readable = {*_LIBRARIES, *asked_for, *_OF_THE_KERNEL, *_python(), *map(str, files)}
    readable |= {os.path.dirname(path) for path in mapped if ".so" in os.path.basename(path)} - {"/"}  # noqa: PTH119, PTH120
    yield from ((path, landlock.READ) for path in sorted(readable))
    yield from ((path, landlock.DEVICE) for path in _DEVICES)
    # The one program that may be started, to check grammars, and the loader that the kernel starts it with.
    yield os.path.realpath(sys.executable), landlock.RUN
    yield from ((path, landlock.RUN) for path in mapped if os.path.basename(path).startswith("ld-"))  # noqa: PTH119


def _python() -> Iterator[str]:
    """Where modules are imported from, also by another interpreter of the same environment."""
    yield from (path for path in sys.path if path.startswith("/"))
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix}:
        yield from (os.path.join(prefix, name) for name in ("lib", "lib64", "pyvenv.cfg"))  # noqa: PTH118


def _gpu_rules() -> Iterator[tuple[str, int]]:
    yield from ((str(path), landlock.DEVICE | landlock.READ) for name in _GPU_DEVICES for path in _DEV.glob(name))
    yield from ((path, landlock.READ) for path in _GPU_READS)


def _drivers_scratch() -> Iterator[str]:
    """Where drivers and compilers leave files for themselves."""
    yield os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  # theirs, not ours
    yield "/dev/shm"  # noqa: S108
    yield os.environ.get("CUDA_CACHE_PATH") or os.path.expanduser("~/.nv")  # noqa: PTH111


def _mapped_files() -> set[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
            lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
    except OSError:
        return set()
    return {fields[5] for fields in lines if len(fields) > 5 and fields[5].startswith("/")}


def _other_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task")) - 1  # noqa: PTH208  # a count is all that is wanted
    except OSError:
        return 0
