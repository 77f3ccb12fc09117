"""Machines with GPUs, for tests: builds the stand-in NVIDIA library (``standin_nvml.c``) and turns its knobs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
GIB = 1 << 30

NO_DRIVER, MISMATCH, UNKNOWN, LOST, NO_PERMISSION, NOT_SUPPORTED = 9, 18, 999, 15, 4, 3
"""Values of nvmlReturn_t for ``fail`` and ``fail_init``."""


class StandInNvml:
    """The NVIDIA driver of processes that are started with ``environ``; all its state is in ``directory``.

    >>> nvml = StandInNvml(tmp_path / "nvml")
    >>> gpu = nvml.add_gpu(total=24 * GIB)
    >>> serve(config, env=nvml.environ)
    >>> gpu.other(20 * GIB)  # somebody else takes most of it
    """

    def __init__(self, directory: Path, *, old_driver: bool = False) -> None:
        """Skips the test where there is no C compiler."""
        self.directory = directory
        self.gpus: list[StandInGpu] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._library = _build("-DOLD_DRIVER") if old_driver else _build()

    @property
    def environ(self) -> dict[str, str]:
        """To be added to the environment of the server (or probe, or engine) that shall see these GPUs."""
        path = os.pathsep.join(filter(None, (str(self._library.parent), os.environ.get("LD_LIBRARY_PATH", ""))))
        return {"LD_LIBRARY_PATH": path, "SLIMPROC_FAKE_NVML": str(self.directory)}

    def add_gpu(
        self, *, total: int = 24 * GIB, uuid: str | None = None, name: str = "Stand-in GPU", reserved: int = 0
    ) -> StandInGpu:
        """One more GPU, last on the PCI bus. Its ``uuid`` is what slimproc calls the device."""
        number = len(self.gpus)
        gpu = StandInGpu(
            self.directory / f"gpu{number}",
            uuid or f"GPU-{number:08x}-1111-2222-3333-444444444444",
            total=total,
            name=name,
            reserved=reserved,
        )
        self.gpus.append(gpu)
        return gpu

    def fail_init(self, code: int) -> None:
        """From now on NVML cannot be initialized (0: it can again)."""
        _write(self.directory / "init", code)

    def hang_init(self, seconds: float) -> None:
        """Initializing takes so long."""
        _write(self.directory / "init_hang_ms", round(seconds * 1000))


class StandInGpu:
    """One GPU, or one MIG instance."""

    def __init__(self, directory: Path, uuid: str, *, total: int, name: str, reserved: int = 0) -> None:
        self.directory = directory
        self.uuid = uuid
        self.total = total
        for folder in ("alloc", "graphics"):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        for file, value in (("name", name), ("total", total), ("reserved", reserved), ("uuid", uuid)):
            _write(directory / file, value)  # the uuid last: with it the device is there

    def add_mig(self, *, total: int, uuid: str | None = None) -> StandInGpu:
        """One more MIG instance of this GPU, which is in MIG mode from then on."""
        _write(self.directory / "mig", 1)
        number = len(list(self.directory.glob("mig[0-9]*")))
        uuid = uuid or f"MIG-{number:x}{self.uuid.removeprefix('GPU-')[1:]}"
        return StandInGpu(self.directory / f"mig{number}", uuid, total=total, name=f"Stand-in MIG {number}")

    def remove(self) -> None:
        """Of a MIG instance: it is destroyed."""
        shutil.rmtree(self.directory)

    # --- memory -------------------------------------------------------------------------------------------------

    def other(self, size: int) -> None:
        """So many bytes are held by processes that NVML does not show."""
        _write(self.directory / "other", size)

    def resize(self, total: int) -> None:
        """It has another number of bytes from now on (a driver's update, ECC, a virtual GPU)."""
        self.total = total
        _write(self.directory / "total", total)

    def allocate(self, pid: int, size: int, *, graphics: bool = False) -> None:
        """The process ``pid`` holds so many bytes, until it is gone."""
        _write(self.directory / ("graphics" if graphics else "alloc") / str(pid), size)

    def allocated(self) -> dict[int, int]:
        """Bytes by process, of the living."""
        held = {}
        for file in (self.directory / "alloc").iterdir():
            if file.name.isdigit() and _alive(int(file.name)):
                with contextlib.suppress(OSError, ValueError):  # it may free it at this moment
                    held[int(file.name)] = int(file.read_text())
        return {pid: size for pid, size in held.items() if size}

    def linger(self, seconds: float) -> None:
        """A dead process's memory stays in use so long after somebody first looked."""
        _write(self.directory / "linger_ms", round(seconds * 1000))

    # --- faults -------------------------------------------------------------------------------------------------

    def fail(self, code: int) -> None:
        """Every call fails with ``code`` (0: no more)."""
        _write(self.directory / "fail", code)

    def fail_memory(self, code: int) -> None:
        """Asking for its memory fails."""
        _write(self.directory / "fail_memory", code)

    def fail_processes(self, code: int) -> None:
        """Asking for its processes fails."""
        _write(self.directory / "fail_processes", code)

    def hang(self, seconds: float) -> None:
        """Every call takes so long."""
        _write(self.directory / "hang_ms", round(seconds * 1000))

    def hide_bytes(self, hidden: bool = True) -> None:  # noqa: FBT001, FBT002
        """Its processes are listed without their bytes."""
        _present(self.directory / "hide_bytes", hidden)

    def hide_processes(self, hidden: bool = True) -> None:  # noqa: FBT001, FBT002
        """Its list of processes is empty."""
        _present(self.directory / "hide_processes", hidden)

    def shift_pids(self, offset: int) -> None:
        """Its processes are listed under the numbers of another namespace, as in a container."""
        _write(self.directory / "shift_pids", offset)


def _write(file: Path, value: object) -> None:
    """At once, since readers take no lock."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(f"{value}\n")
    temporary.replace(file)


def _present(file: Path, wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        _write(file, 1)
    else:
        file.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _build(*options: str) -> Path:
    """The compiled library, made once for every version of its source however many test processes want it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path("/proc/self/stat").exists():
        pytest.skip("the stand-in NVIDIA library needs a C compiler and Linux")
    version = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, options)).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"standin-nvml-{os.getuid()}-{version}" / "libnvidia-ml.so.1"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        made = library.with_name(f"{os.getpid()}.so")
        command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden"]
        command += ["-Wl,-soname,libnvidia-ml.so.1", *options, "-o", str(made), str(SOURCE)]
        compiled = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert compiled.returncode == 0, compiled.stderr
        assert not compiled.stderr, compiled.stderr
        made.replace(library)
    return library
