"""The ring's memory: making it without a name, and the 4096-byte header in front of the frames.

It is handed over by descriptor only. A named segment is unlinked under living users by Python's resource tracker
before 3.13, outlives a kill of its process group, and raises SIGBUS where ``/dev/shm`` is small.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import mmap
import os
import secrets
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from slimproc.errors import RingCorrupt

HEADER_BYTES = 4096
MIN_CAPACITY = 64 * 1024
MAX_CAPACITY = 1 << 30
"""A pipe's credit records are 32 bits wide."""
MAX_RIDS = 110
"""What fits between offsets 128 and 1024."""

_MAGIC = b"SLPRING1"
_MAJOR, _MINOR = 1, 0
_FLAG_CRC, _FLAG_PIPE = 1, 2
_HEADER = struct.Struct("<8sHHIQQIIII")
_HEADER_CRC = struct.Struct("<I")
_PROGRESS, _PROGRESS_AT = struct.Struct("<6Q"), 64
_BLACK_BOX, _BLACK_BOX_AT = struct.Struct("<II"), 128
INSIDE_AT = 1016
"""One byte behind the last rid: 1 during a native call."""

_REFUSALS = {errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP}
"""A sandbox forbids this kind of memory, or the kernel lacks it: the next kind may do."""


class Header(NamedTuple):
    """What creation wrote. ``capacity`` and ``max_payload`` are bytes."""

    capacity: int
    max_payload: int
    epoch: int
    replica: int
    crc: bool
    pipe: bool


class Progress(NamedTuple):
    """What the engine says of itself, advisory: nothing here may decide what is read or where."""

    steps: int
    last_step_ns: int
    """``time.monotonic_ns()``."""
    frames: int
    bytes: int
    full_hits: int
    """Publications that found the ring full."""
    merged_tokens: int
    """Tokens that were joined to earlier ones of their sequence because of it."""


class BlackBox(NamedTuple):
    """What a native call was about when the engine died: ``rids`` are the requests inside it. Advisory."""

    phase: int
    rids: tuple[int, ...]
    inside: bool = False
    """It was in the call, and not between two of them."""


def create_region(capacity: int, *, epoch: int, replica: int, credit: str, crc: bool = True) -> int:
    """A descriptor of fresh zeroed memory with its header written.

    ``capacity`` is bytes of frames, a power of two from 64 KiB to 1 GiB. Room is reserved now, so that a shortage is
    an error here and not a SIGBUS later. Raises ValueError, and OSError naming the size and the remedy.
    """
    if capacity & (capacity - 1) or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a ring's capacity is a power of two from {MIN_CAPACITY} to {MAX_CAPACITY}, not {capacity}")
    size = -(-(HEADER_BYTES + capacity) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        fd = _allocate(size)
    except OSError as error:
        message = f"cannot make a ring of {size} bytes of shared memory: {error.strerror}; {_remedy(error.errno)}"
        raise OSError(error.errno, message) from error
    try:
        flags = (_FLAG_CRC if crc else 0) | (_FLAG_PIPE if credit == "pipe" else 0)
        header = _HEADER.pack(
            _MAGIC, _MAJOR, _MINOR, HEADER_BYTES, capacity, epoch, replica, flags, capacity // 8, os.getpid()
        )
        with mmap.mmap(fd, HEADER_BYTES) as memory:
            memory[: len(header)] = header
            _HEADER_CRC.pack_into(memory, len(header), zlib.crc32(header))
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_region(fd: int, *, writable: bool) -> tuple[mmap.mmap, Header]:
    """Map the whole region, shared. ``fd`` may be closed afterwards. Raises RingCorrupt, OSError."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    size = os.fstat(fd).st_size
    if size < HEADER_BYTES:
        raise RingCorrupt(f"a ring of {size} bytes has no header")
    with mmap.mmap(fd, HEADER_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        header = _read_header(memory[: _HEADER.size + _HEADER_CRC.size], size)
    return mmap.mmap(fd, HEADER_BYTES + header.capacity, mmap.MAP_SHARED, protection), header


def read_progress(memory: mmap.mmap) -> Progress:
    return Progress(*_PROGRESS.unpack_from(memory, _PROGRESS_AT))


def write_progress(memory: mmap.mmap, progress: Sequence[int]) -> None:
    _PROGRESS.pack_into(memory, _PROGRESS_AT, *progress)


def read_black_box(memory: mmap.mmap) -> BlackBox:
    phase, count = _BLACK_BOX.unpack_from(memory, _BLACK_BOX_AT)
    rids = struct.unpack_from(f"<{min(count, MAX_RIDS)}Q", memory, _BLACK_BOX_AT + _BLACK_BOX.size)
    return BlackBox(phase, rids, memory[INSIDE_AT] == 1)


def write_black_box(memory: mmap.mmap, phase: int, rids: Sequence[int]) -> None:
    rids = rids[-MAX_RIDS:]
    struct.pack_into(f"<II{len(rids)}Q", memory, _BLACK_BOX_AT, phase, len(rids), *rids)


def _read_header(data: bytes, size: int) -> Header:
    fields = _HEADER.unpack_from(data)
    magic, major, _minor, header_bytes, capacity, epoch, replica, flags, max_payload, _pid = fields
    if magic != _MAGIC:
        raise RingCorrupt(f"this memory is no ring: it begins with {magic!r}, not {_MAGIC!r}")
    if major != _MAJOR:
        raise RingCorrupt(f"the ring's format is version {major}; this build reads version {_MAJOR}")
    if zlib.crc32(data[: _HEADER.size]) != _HEADER_CRC.unpack_from(data, _HEADER.size)[0]:
        raise RingCorrupt("the ring's header does not match its checksum")
    if header_bytes != HEADER_BYTES or size < HEADER_BYTES + capacity:
        raise RingCorrupt(f"the ring's header wants {header_bytes} + {capacity} bytes, but the memory has {size}")
    return Header(capacity, max_payload, epoch, replica, bool(flags & _FLAG_CRC), bool(flags & _FLAG_PIPE))


def _allocate(size: int) -> int:
    refusal: OSError | None = None
    for kind in _KINDS:
        try:
            return kind(size)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            refusal = error
    assert refusal is not None
    raise refusal


def _sealed_memfd(size: int) -> int:
    """Linux's anonymous file, sealed: an engine cannot shrink it, so the front cannot be made to raise SIGBUS."""
    fd = os.memfd_create("slimproc-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _reserve(fd, size)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked_posix_memory(size: int) -> int:
    """POSIX shared memory that has lost its name before anyone else could learn it: macOS has no memfd."""
    try:
        posix: Any = importlib.import_module("_posixshmem")  # CPython's own, but not in every build
    except ImportError:
        raise OSError(errno.ENOSYS, "this Python has no POSIX shared memory") from None
    name = f"/slp{secrets.token_hex(6)}"  # macOS allows 31 characters
    fd: int = posix.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        posix.shm_unlink(name)
    except BaseException:
        os.close(fd)
        raise
    _reserve(fd, size)
    return fd


def _unlinked_file(size: int) -> int:
    """Where a sandbox allows neither: slower only in that the kernel may write pages back."""
    with tempfile.TemporaryFile(prefix="slimproc-ring-") as file:
        fd = os.dup(file.fileno())
    _reserve(fd, size)
    return fd


def _reserve(fd: int, size: int) -> None:
    """Set the size and take the memory now. Closes ``fd`` when that fails."""
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise


_KINDS: list[Callable[[int], int]] = [
    _sealed_memfd if sys.platform == "linux" else _unlinked_posix_memory,
    _unlinked_file,
]


def _remedy(number: int | None) -> str:
    match number:
        case errno.EFBIG:
            return "raise the file size limit (ulimit -f, LimitFSIZE=) or make the ring smaller"
        case errno.EMFILE | errno.ENFILE:
            return "raise the limit on open files (ulimit -n, LimitNOFILE=)"
        case errno.ENOSPC | errno.ENOMEM:
            return "free memory, raise the container's memory limit, run fewer replicas or make the ring smaller"
        case _:
            return "allow memfd_create, or a temporary directory that can be written (TMPDIR)"
