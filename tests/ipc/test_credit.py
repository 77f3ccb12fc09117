"""Credit channels: nothing is lost, nothing waits, nothing is inherited."""

from __future__ import annotations

import os
import struct
import sys

import pytest

from slimproc.ipc.credit import (
    PipeCredit,
    create_credit,
    default_credit,
    open_credit_reader,
    open_credit_writer,
)


@pytest.fixture
def pair(credit):
    pair = create_credit(credit)
    yield pair
    pair.close()


def test_what_is_added_is_taken_once_as_one_sum(pair):
    assert pair.reader.take() == 0
    pair.writer.add(64)
    pair.writer.add(400)
    assert pair.reader.take() == 464
    assert pair.reader.take() == 0


def test_descriptors_are_nonblocking_and_closed_on_exec(pair):
    for fd in (pair.reader_fd, pair.writer_fd):
        assert not os.get_blocking(fd)
        assert not os.get_inheritable(fd)


def test_ends_opened_by_number_work_and_are_not_passed_on_to_children(credit, pair):
    reader_fd, writer_fd = os.dup(pair.reader_fd), os.dup(pair.writer_fd)
    for fd in (reader_fd, writer_fd):
        os.set_inheritable(fd, True)
        os.set_blocking(fd, True)
    reader, writer = open_credit_reader(credit, reader_fd), open_credit_writer(credit, writer_fd)
    try:
        assert reader.take() == 0, "must not block"
        writer.add(48)
        assert reader.take() == 48
        assert not os.get_inheritable(reader_fd)
        assert not os.get_inheritable(writer_fd)
    finally:
        reader.close()
        writer.close()


def test_a_full_pipe_keeps_a_debt_and_loses_nothing():
    pair = create_credit("pipe")
    added = 0
    while not pair.writer.debt:
        pair.writer.add(16)
        added += 16
    pair.writer.add(16)
    added += 16
    assert pair.writer.debt == 32
    assert not pair.writer.flush()
    taken = pair.reader.take()
    assert pair.writer.flush()
    assert pair.writer.debt == 0
    while more := pair.reader.take():
        taken += more
    assert taken == added
    pair.close()


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="Linux only")
def test_a_full_eventfd_keeps_a_debt_and_loses_nothing():
    pair = create_credit("eventfd")
    most = 2**64 - 2
    pair.writer.add(most)
    pair.writer.add(16)
    assert pair.writer.debt == 16
    assert not pair.writer.flush()
    assert pair.reader.take() == most
    assert pair.writer.flush()
    assert pair.reader.take() == 16
    pair.close()


def test_a_record_cut_in_two_is_put_together():
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    reader = PipeCredit(read_fd)
    record = struct.pack("=I", 70000)
    os.write(write_fd, record + record[:1])
    assert reader.take() == 70000
    os.write(write_fd, record[1:])
    assert reader.take() == 70000
    reader.close()
    os.close(write_fd)


def test_adding_to_a_reader_that_is_gone_is_no_error():
    pair = create_credit("pipe")
    pair.close_reader()
    pair.writer.add(16)
    assert pair.writer.ended
    assert pair.writer.flush()
    pair.close()


def test_a_reader_whose_writer_is_gone_takes_what_is_there_and_then_says_so():
    pair = create_credit("pipe")
    pair.writer.add(16)
    pair.close_writer()
    assert pair.reader.take() == 16
    assert not pair.reader.ended
    assert pair.reader.take() == 0
    assert pair.reader.ended
    pair.close()


def test_giving_one_end_away_keeps_the_other_usable(pair):
    theirs = os.dup(pair.writer_fd)
    pair.close_writer()
    os.write(theirs, struct.pack("=Q" if pair.reader is pair.writer else "=I", 32))
    assert pair.reader.take() == 32
    os.close(theirs)


def test_closing_twice_is_harmless(pair):
    pair.close()
    pair.close()
    assert pair.reader_fd == -1


def test_the_kind_is_checked():
    for call in (create_credit, lambda kind: open_credit_reader(kind, 0)):
        with pytest.raises(ValueError, match="eventfd or pipe"):
            call("futex")


def test_the_default_is_eventfd_on_linux_only():
    assert default_credit() == ("eventfd" if sys.platform == "linux" else "pipe")
