"""The ring's memory: reserved, sealed, nameless, and refused when it is not what it should be."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
import struct
import sys
import zlib
from pathlib import Path

import pytest

from slimproc.engines import loop
from slimproc.errors import RingCorrupt
from slimproc.ipc import region
from slimproc.ipc.region import BlackBox, Progress, create_region
from slimproc.ipc.ring import _HEADER as FRAME_HEADER
from slimproc.ipc.ring import PAD, RingReader, RingWriter
from slimproc.ipc.wire import EVENT, STEP
from tests.documents import ROOT

MiB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux's")


@pytest.fixture
def fd():
    fd = create_region(MiB, epoch=2**63 + 1, replica=3, credit="pipe")
    yield fd
    os.close(fd)


def descriptors():
    return sorted(int(path.name) for path in Path("/dev/fd").iterdir())


@contextlib.contextmanager
def header_changed(fd, offset, data, *, resealed=True):
    """Overwrite part of the header, and make its checksum right again unless told not to."""
    with mmap.mmap(fd, 4096) as memory:
        before = memory[:52]
        memory[offset : offset + len(data)] = data
        if resealed:
            memory[48:52] = struct.pack("<I", zlib.crc32(memory[:48]))
        yield
        memory[:52] = before


def test_the_header_says_what_the_format_page_says(fd):
    with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as memory:
        fields = struct.unpack_from("<8sHHIQQIIII", memory)
    assert fields == (b"SLPRING1", 1, 0, 4096, MiB, 2**63 + 1, 3, 3, MiB // 8, os.getpid())
    assert os.fstat(fd).st_size % mmap.PAGESIZE == 0
    assert not os.get_inheritable(fd)


KINDS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "bytes": "s"}


def table(heading):
    """(offset, format as ``struct`` spells it) of each row of the table under a heading of the format page."""
    for offset, kinds in re.findall(r"^\| (\d+) \| ([^|]+) \|", section(heading), re.MULTILINE):
        parts = [part.replace(" \N{MULTIPLICATION SIGN} ", " ").rpartition(" ") for part in kinds.split(", ")]
        yield int(offset), "".join(count + KINDS[kind] for count, _, kind in parts)


def section(heading):
    page = (ROOT / "docs" / "ring-format.md").read_text("utf-8")
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def gapless(rows):
    """Their formats as one, each row at the offset where the one before ends."""
    whole = "<"
    for offset, kinds in rows:
        assert offset == struct.calcsize(whole)
        whole += kinds
    return whole


def test_the_tables_of_the_format_page_are_the_codes():
    rows = dict(table("Region"))
    header = [row for row in rows.items() if row[0] < region._PROGRESS_AT]
    assert gapless(header) == region._HEADER.format + region._HEADER_CRC.format[1:]
    assert {offset: kinds for offset, kinds in rows.items() if offset >= region._PROGRESS_AT} == {
        region._PROGRESS_AT: region._PROGRESS.format[1:],
        region._BLACK_BOX_AT: region._BLACK_BOX.format[1:] + "nQ",
        region.INSIDE_AT: "B",
    }
    *head, (payload, kinds) = table("Frame")
    assert gapless(head) == "<IIIHH", "type and flags are the two halves of the code's last field"
    assert (payload, kinds) == (FRAME_HEADER.size, "ns")


def test_the_numbers_of_the_format_page_are_the_codes():
    said = " ".join((section("Region") + section("Frame")).split())
    assert f"{region.HEADER_BYTES} bytes of header" in said
    assert f"magic `{region._MAGIC.decode()}`" in said
    assert f"flags: {region._FLAG_CRC} checksums are on, {region._FLAG_PIPE} credit goes by pipe" in said
    assert f"the last {region.MAX_RIDS})" in said
    assert f"type: {STEP} step, {PAD} padding, {EVENT} event" in said
    phases = loop.PHASE_LOADING, loop.PHASE_IDLE, loop.PHASE_PREFILL, loop.PHASE_DECODE, loop.PHASE_ACCEPT
    assert "phase {} loads, {} is idle, {} reads prompts, {} decodes, {} takes one command in".format(*phases) in said


@pytest.mark.parametrize("capacity", [0, -1, 1000, 32 * 1024, 100_000, 2 << 30])
def test_a_capacity_that_is_no_power_of_two_in_range_is_refused(capacity):
    with pytest.raises(ValueError, match="power of two"):
        create_region(capacity, epoch=1, replica=0, credit="pipe")


@linux
def test_the_memory_is_reserved_and_sealed_and_has_no_name(fd):
    assert os.fstat(fd).st_blocks * 512 >= MiB
    for size in (0, 4096, 2 * MiB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert "(deleted)" in str(Path(f"/proc/self/fd/{fd}").readlink())


@linux
def test_the_fronts_map_is_read_only(ring):
    with pytest.raises(TypeError):
        ring.reader._memory[5000] = 1
    ring.writer.close()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "slimproc-ring" in line]
    assert [line.split()[1] for line in lines] == ["r--s"]


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"SLPRING0", "is no ring"),
        (8, struct.pack("<H", 2), "version 2"),
        (12, struct.pack("<I", 8192), "header wants"),
        (16, struct.pack("<Q", 4 * MiB), "header wants"),
        (24, struct.pack("<Q", 12345), "incarnation 12345, not"),
    ],
)
def test_a_wrong_header_is_refused_and_the_message_says_what_is_wrong(fd, offset, data, message):
    with header_changed(fd, offset, data), pytest.raises(RingCorrupt, match=message):
        RingReader(fd, None, None, epoch=2**63 + 1)


def test_a_header_that_does_not_match_its_checksum_is_refused(fd):
    with header_changed(fd, 32, b"\x09", resealed=False):
        with pytest.raises(RingCorrupt, match="checksum"):
            RingReader(fd, None, None, epoch=2**63 + 1)
        with pytest.raises(RingCorrupt, match="checksum"):
            RingWriter(fd, None, None)


def test_a_newer_minor_version_is_read(fd):
    with header_changed(fd, 10, struct.pack("<H", 9)):
        RingReader(fd, None, None, epoch=2**63 + 1).close()


def test_something_too_small_to_be_a_ring_is_refused(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"SLPRING1")
    with path.open("r+b") as file, pytest.raises(RingCorrupt, match="no header"):
        RingReader(file.fileno(), None, None, epoch=1)


def test_progress_and_black_box_are_seen_by_the_reader(ring):
    assert ring.reader.black_box() == BlackBox(0, ())
    ring.writer.set_phase(4, [5, 2**40, 7])
    assert ring.reader.black_box() == BlackBox(4, (5, 2**40, 7))
    ring.writer.set_phase(2, [])
    assert ring.reader.black_box() == BlackBox(2, ())
    assert ring.writer.put(STEP, b"x" * 20)
    ring.writer.commit()
    ring.writer.merged_tokens = 6
    ring.writer.mark_step(9, 123456789)
    assert ring.reader.progress() == Progress(9, 123456789, 1, 48, 0, 6)


def test_the_black_box_keeps_the_last_110_requests_and_stays_inside_the_header(ring):
    ring.writer.set_phase(4, range(1000, 1200))
    assert ring.reader.black_box().rids == tuple(range(1090, 1200))
    assert ring.reader._memory[1024:4096] == bytes(3072)


def test_a_black_box_that_is_nonsense_is_read_without_harm(ring):
    ring.writer._memory[128:1024] = b"\xff" * 896
    box = ring.reader.black_box()
    assert len(box.rids) == 110


@linux
def test_a_file_size_limit_gives_an_error_that_names_size_and_remedy():
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB // 2, hard))
    try:
        with pytest.raises(OSError, match=r"1052672 bytes.*ulimit -f") as caught:
            create_region(MiB, epoch=1, replica=0, credit="pipe")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert descriptors() == before


@linux
def test_no_descriptor_left_gives_an_error_that_names_the_remedy():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="ulimit -n"):
            create_region(MiB, epoch=1, replica=0, credit="pipe")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@linux
def test_a_shortage_of_memory_is_an_error_at_creation_and_leaves_nothing_behind(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"1052672 bytes.*raise the container's memory limit") as caught:
        create_region(MiB, epoch=1, replica=0, credit="pipe")
    assert caught.value.errno == errno.ENOSPC
    assert descriptors() == before


@linux
def test_where_memfd_is_forbidden_an_unlinked_file_does(monkeypatch, make_ring, tmp_path):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "forbidden here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ring = make_ring()
    assert Path(f"/proc/self/fd/{ring.fd}").readlink().is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []
    ring.writer.put(STEP, b"still works")
    ring.writer.commit()
    assert ring.read() == [(STEP, b"still works")]


def test_the_way_of_macos_works_and_leaves_no_name(monkeypatch, make_ring):
    pytest.importorskip("_posixshmem", reason="this Python has no POSIX shared memory")
    monkeypatch.setattr(region, "_KINDS", [region._unlinked_posix_memory])
    ring = make_ring()
    assert not os.get_inheritable(ring.fd)
    if sys.platform == "linux":
        assert Path(f"/proc/self/fd/{ring.fd}").readlink().name.endswith("(deleted)")
    ring.writer.put(STEP, b"still works")
    ring.writer.commit()
    assert ring.read() == [(STEP, b"still works")]
