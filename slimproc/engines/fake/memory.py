"""The fake backend's GPU memory: taken from the stand-in NVIDIA driver where tests have set one up, and else from nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from slimproc.errors import LoadFailed

_STATE: Final = "SLIMPROC_FAKE_NVML"
"""The folder of the stand-in driver: ``gpuN/`` has ``uuid``, ``total``, ``other`` and, by process, ``alloc/PID``."""
_LISTS: Final = ("alloc", "graphics")


class FakeMemory:
    """What this process holds on the one GPU that it sees (the first of CUDA_VISIBLE_DEVICES, by UUID). Without a stand-in
    driver, or without a GPU, nothing is held anywhere.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._root = environ.get(_STATE)
        self._device = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        self._folder: Path | None = None

    @property
    def scratch(self) -> tuple[Path, ...]:
        """The folder that this writes to, if any, and where it sees whether other engines live."""
        return (Path(self._root), Path("/proc")) if self._root else ()

    def hold(self, size: int) -> None:
        """Hold ``size`` bytes from now on, instead of what was held before. Raises LoadFailed as CUDA would fail."""
        if not self._root or not self._device:
            return
        folder = self._folder or _find(Path(self._root), self._device)
        if failure := _number(folder / "fail"):
            raise LoadFailed(f"CUDA error: {self._device} does not answer (NVML says {failure})")
        with _alone(folder):
            free = _free(folder)
            if size > free:
                wanted = f"{size} bytes do not fit {self._device}, {free} are free"
                raise LoadFailed(f"CUDA error: out of memory: {wanted}", scarce=True)
            self._folder = folder
            _write(folder / "alloc" / str(os.getpid()), size)

    def free(self) -> None:
        if self._folder is not None:
            (self._folder / "alloc" / str(os.getpid())).unlink(missing_ok=True)
            self._folder = None


def _find(root: Path, device: str) -> Path:
    for folder in (*root.glob("gpu*"), *root.glob("gpu*/mig*")):
        if folder.is_dir() and _text(folder / "uuid") == device:
            return folder
    raise LoadFailed(f"CUDA error: no CUDA-capable device is detected (there is no {device})")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A driver gives the same bytes to one process only."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free(folder: Path) -> int:
    """For this process: what it holds itself is not in the way."""
    taken = _number(folder / "reserved") + _number(folder / "other")
    for name in _LISTS:
        for file in (folder / name).glob("[0-9]*"):
            if not file.name.isdigit() or file.name == str(os.getpid()):
                continue
            if _alive(int(file.name)) or _lingers(folder, file):
                taken += _number(file)
    return max(0, _number(folder / "total") - taken)


def _alive(pid: int) -> bool:
    """A zombie is not: its memory is gone. Where another's /proc is hidden from us, only its existence can be asked."""
    if status := _text(Path(f"/proc/{pid}/stat")):
        return status.rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lingers(folder: Path, file: Path) -> bool:
    """Whether a dead process's memory is in use still. Whoever sees the death first writes down when."""
    linger = _number(folder / "linger_ms")
    if not linger:
        return False
    now = time.monotonic_ns() // 1_000_000
    died = file.with_name(f"{file.name}.dead")
    if not died.exists():
        _write(died, now)
    return now - _number(died) < linger


def _write(file: Path, value: int) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(str(value))
    temporary.replace(file)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int:
    with contextlib.suppress(ValueError):
        return int(_text(file))
    return 0
