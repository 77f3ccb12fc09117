"""The ring in one process: order, wrapping, budgets, and every kind of corruption."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.errors import RingCorrupt
from slimproc.ipc import ring as ring_module
from slimproc.ipc.region import HEADER_BYTES, MIN_CAPACITY
from slimproc.ipc.ring import PAD, RingReader
from slimproc.ipc.wire import EVENT, STEP
from tests.ipc.conftest import EPOCH, Ring

LARGEST = MIN_CAPACITY // 8


def ring_size(payload_length):
    return 16 + -(-payload_length // 16) * 16


def pour(ring: Ring, frames: int, seed: int) -> None:
    """Random payloads through the ring, random commits and reads; each must come out as it went in, in order."""
    choose = random.Random(seed)
    noise = choose.randbytes(2 * LARGEST)
    expected: deque[tuple[int, bytes]] = deque()
    put = read = 0

    def check(kind, payload, _alone):
        nonlocal read
        assert (kind, payload) == expected.popleft(), f"frame {read}"
        read += 1

    while read < frames:
        while put < frames:
            length = choose.randrange(200) if choose.random() < 0.9 else choose.randrange(LARGEST + 1)
            start = choose.randrange(LARGEST)
            frame = (choose.choice((STEP, EVENT)), noise[start : start + length])
            if not ring.writer.put(*frame):
                break
            put += 1
            expected.append(frame)
            if choose.random() < 0.3:
                ring.writer.commit()
                if choose.random() < 0.3:
                    break
        ring.writer.commit()
        for _ in range(choose.randrange(1, 6)):
            ring.reader.drain(check)
    assert not expected


def test_a_hundred_thousand_random_frames_come_out_as_they_went_in(ring):
    pour(ring, 100_000, seed=1)


@pytest.mark.slow
def test_a_million_random_frames_come_out_as_they_went_in(ring):
    pour(ring, 1_000_000, seed=3)


def test_a_frame_wraps_at_every_offset_before_the_end(ring):
    """For every room that can be left before the end, a frame that just fits there and one that just does not."""
    writer, end = ring.writer, HEADER_BYTES + ring.capacity
    for room in range(0, LARGEST + 16, 16):
        for too_long in (0, 1):
            length = max(0, room - 16) + too_long if room else too_long
            if length > LARGEST:
                continue
            while writer._at != end - room:
                distance = end - room - writer._at
                fill = distance if 0 < distance <= LARGEST else min(LARGEST, end - writer._at)
                assert writer.put(STEP, bytes(max(0, min(fill, LARGEST) - 16)))
                writer.commit()
                ring.read()
            payload = random.Random(room).randbytes(length)
            sequence = writer._sequence
            assert writer.put(EVENT, payload)
            padded = room != 0 and ring_size(length) > room
            assert writer._sequence == sequence + 1 + padded
            writer.commit()
            assert ring.read() == [(EVENT, payload)]
            assert ring.reader._at in {writer._at, HEADER_BYTES}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, LARGEST)),
            st.tuples(st.just("commit"), st.just(0)),
            st.tuples(st.just("drain"), st.integers(1, 20)),
        ),
        max_size=120,
    )
)
def test_any_order_of_puts_commits_and_drains_behaves_like_a_queue(operations):
    ring = Ring("pipe")
    unpublished: list[bytes] = []
    published: deque[bytes] = deque()
    got: list[bytes] = []
    number = 0
    try:
        for what, n in operations:
            if what == "put":
                payload = (b"%d " % number * n)[:n]
                if ring.writer.put(STEP, payload):
                    unpublished.append(payload)
                    number += 1
            elif what == "commit":
                ring.writer.commit()
                published.extend(unpublished)
                unpublished.clear()
            else:
                got.clear()
                more = ring.reader.drain(lambda _kind, payload, _alone: got.append(payload), n)
                assert len(got) <= n
                for payload in got:
                    assert payload == published.popleft()
                assert more or not published, "False says that all that was credited has been read"
    finally:
        ring.close()


def test_without_checksums_frames_come_out_as_they_went_in(make_ring):
    pour(make_ring(crc=False), 2000, seed=2)


def test_what_is_not_committed_does_not_exist(ring):
    ring.writer.put(STEP, b"one")
    assert ring.read() == []
    ring.writer.commit()
    ring.writer.put(STEP, b"two")
    assert ring.read() == [(STEP, b"one")]


def test_a_full_ring_refuses_at_once_and_writes_nothing(ring):
    frames = 0
    while ring.writer.put(STEP, bytes(1000)):
        frames += 1
    ring.writer.commit()
    assert frames == ring.capacity // ring_size(1000)
    before = ring.reader._memory[:]
    assert not ring.writer.put(STEP, b"x" * 1000)
    assert not ring.writer.fits(1000)
    assert ring.reader._memory[:] == before
    assert len(ring.read()) == frames
    assert ring.writer.put(STEP, b"x" * 1000)


@pytest.mark.parametrize("capacity", [MIN_CAPACITY, 1 << 20])
def test_space_that_the_reader_holds_back_never_starves_the_writer(make_ring, capacity):
    ring = make_ring(capacity)
    for i in range(200):
        length = ring.writer.max_payload - i % 40 * 16
        assert ring.writer.put(STEP, bytes(length)), f"frame {i}"
        ring.writer.commit()
        assert len(ring.read()) == 1


def test_more_than_max_payload_is_the_callers_bug(ring):
    assert ring.writer.max_payload == LARGEST
    assert ring.writer.put(STEP, bytes(LARGEST))
    with pytest.raises(ValueError, match="8192 bytes, not 8193"):
        ring.writer.put(STEP, bytes(LARGEST + 1))


def test_one_drain_handles_at_most_its_budget(ring):
    for i in range(40):
        ring.writer.put(STEP, b"%d" % i)
        ring.writer.commit()
    got: list[bytes] = []
    seen = []
    while ring.reader.drain(lambda _kind, payload, _alone: got.append(payload)):
        seen.append((len(got), ring.reader.pending))
    assert seen[:3] == [(16, 24 * 32), (32, 8 * 32), (40, 0)]
    assert got == [b"%d" % i for i in range(40)]


def test_one_drain_ends_after_about_a_millisecond(ring, monkeypatch):
    now = iter(range(0, 10**9, 700_000))
    monkeypatch.setattr(ring_module, "monotonic_ns", lambda: next(now))
    for _ in range(10):
        ring.writer.put(STEP, bytes(2000))
    ring.writer.commit()
    got: list[int] = []
    assert ring.reader.drain(lambda kind, _payload, _alone: got.append(kind))
    assert len(got) == 3


def test_alone_is_told_for_a_single_frame_and_for_no_other(ring):
    told: list[bool] = []

    def drain(budget=16):
        while ring.reader.drain(lambda _kind, _payload, alone: told.append(alone), budget):
            pass

    ring.writer.put(STEP, b"a")
    ring.writer.commit()
    drain()
    assert told == [True]
    ring.writer.put(STEP, b"b")
    ring.writer.put(STEP, b"c")
    ring.writer.commit()
    drain()
    assert told == [True, False, False]


def test_a_frame_after_padding_is_still_alone(ring):
    told: list[bool] = []
    while ring.capacity + HEADER_BYTES - ring.writer._at > 1000:
        ring.writer.put(STEP, bytes(500))
        ring.writer.commit()
        ring.read()
    ring.writer.put(STEP, bytes(4000))
    ring.writer.commit()
    ring.reader.drain(lambda _kind, _payload, alone: told.append(alone))
    assert told == [True]


def test_an_exception_of_the_handler_passes_through_and_its_frame_counts_as_read(ring):
    def fail_on_two(_kind, payload, _alone):
        if payload == b"2":
            raise KeyError("handler's own")

    for i in range(5):
        ring.writer.put(STEP, b"%d" % i)
    ring.writer.commit()
    with pytest.raises(KeyError, match="handler's own"):
        ring.reader.drain(fail_on_two)
    assert ring.read() == [(STEP, b"3"), (STEP, b"4")]


def test_sequence_numbers_wrap_at_32_bits(ring):
    ring.writer._sequence = ring.reader._sequence = 2**32 - 3
    for i in range(6):
        ring.writer.put(STEP, b"%d" % i)
    ring.writer.commit()
    assert ring.read() == [(STEP, b"%d" % i) for i in range(6)]
    assert ring.writer._sequence == ring.reader._sequence == 3


def test_statistics_count_what_was_read(ring):
    for _ in range(20):
        ring.writer.put(STEP, bytes(10))
    ring.writer.commit()
    ring.reader.drain(lambda *_: None)
    statistics = ring.reader.statistics()
    assert statistics._asdict() == {
        "capacity": MIN_CAPACITY, "frames": 16, "bytes": 16 * 32, "wakeups": 1, "pending": 4 * 32,
    }  # fmt: skip
    assert "128 pending" in repr(ring.reader)


# --- corruption -------------------------------------------------------------------------------------------------


def expect_corrupt(ring: Ring, message: str) -> None:
    for _ in range(2):  # there is no way back
        with pytest.raises(RingCorrupt, match=message):
            ring.read()


def test_more_credit_than_the_ring_has_is_corruption(ring):
    ring.data.writer.add(ring.capacity + 16)
    expect_corrupt(ring, "bytes are credited in a ring of 65536")


def test_credit_without_a_frame_is_corruption(ring):
    ring.data.writer.add(16)
    ring.reader._sequence = 1
    expect_corrupt(ring, "frame 1 was due")


def test_a_frame_longer_than_its_credit_is_corruption(ring):
    ring.writer.put(STEP, bytes(100))
    ring.data.writer.add(64)
    expect_corrupt(ring, "with 64 bytes credited")


def test_a_frame_out_of_turn_is_corruption(ring):
    ring.writer._sequence = 5
    ring.writer.put(STEP, b"x")
    ring.writer.commit()
    expect_corrupt(ring, "frame 0 was due; found number 5")


@pytest.mark.parametrize("kind", [0, 4, 255, STEP | 1 << 16, PAD | 1 << 16])
def test_an_unknown_type_or_a_flag_is_corruption(ring, kind):
    ring.writer.put(kind, b"x")
    ring.writer.commit()
    expect_corrupt(ring, "unknown type|does not match its checksum")


def test_frames_before_the_corrupt_one_are_delivered(ring):
    for i in range(3):
        ring.writer.put(STEP, b"%d" % i)
    ring.writer._memory[HEADER_BYTES + 2 * 32 + 16] ^= 1
    ring.writer.commit()
    got: list[bytes] = []
    with pytest.raises(RingCorrupt, match="frame 2 at 4160 does not match its checksum"):
        ring.reader.drain(lambda _kind, payload, _alone: got.append(payload))
    assert got == [b"0", b"1"]


def flip_and_read(ring: Ring, offset: int, bit: int, credit: int, reader: RingReader) -> list[tuple[int, bytes]] | None:
    """What the reader makes of the frames with one bit changed; None when it refuses them."""
    reader._at, reader._sequence, reader.pending = HEADER_BYTES, 0, 0
    ring.writer._memory[offset] ^= 1 << bit
    ring.data.writer.add(credit)
    frames: list[tuple[int, bytes]] = []
    try:
        while reader.drain(lambda kind, payload, _alone: frames.append((kind, payload)), 1000):
            pass
    except RingCorrupt:
        return None
    finally:
        ring.writer._memory[offset] ^= 1 << bit
    return frames


def test_no_flip_of_any_one_bit_passes_silently(ring):
    """All of a few frames' bits: headers, payloads and padding, and 2,000 at random over the whole ring, PAD and all."""
    choose = random.Random(64)
    frames, padding = [], set()
    while True:
        payload = choose.randbytes(choose.randrange(LARGEST if frames[30:] else 60))
        at, free = ring.writer._at, ring.writer.free
        room = ring.capacity + HEADER_BYTES - at
        if room < ring_size(len(payload)):
            length = room - 16
            crc = length ^ PAD << 20
            ring_module._HEADER.pack_into(ring.writer._memory, at, length, crc, len(frames), PAD)
            padding.update(range(at + 16, at + room))
            break
        assert ring.writer.put(choose.choice((STEP, EVENT)), payload)
        assert ring.writer.free == free - ring_size(len(payload))
        frames.append(payload)
        padding.update(range(at + 16 + len(payload), ring.writer._at))
    first = sum(map(ring_size, map(len, frames[:20])))
    flips = [(HEADER_BYTES + i // 8, i % 8) for i in range(first * 8)]
    flips += [(HEADER_BYTES + choose.randrange(ring.capacity), choose.randrange(8)) for _ in range(2000)]
    caught = 0
    for offset, bit in flips:
        read = flip_and_read(ring, offset, bit, ring.capacity, ring.reader)
        if read is None:
            caught += 1
            continue
        assert [payload for _, payload in read] == frames, f"silent: bit {bit} of byte {offset}"
        assert offset in padding, f"unnoticed: bit {bit} of byte {offset}"
    assert caught > len(flips) // 2


def test_closing_twice_is_harmless_and_a_kept_payload_stays_valid(ring):
    ring.writer.put(STEP, b"kept")
    ring.writer.commit()
    ((_, payload),) = ring.read()
    for end in (ring.reader, ring.writer):
        end.close()
        end.close()
    assert payload == b"kept"
    assert ring.writer.epoch == EPOCH
