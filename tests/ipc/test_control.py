"""The control socket: whole messages in order, however they are cut, and no wait for anyone."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import pytest

from slimproc.ipc.control import MAX_MESSAGE, ControlClosed, ControlCorrupt, ControlSocket


class Pair:
    def __init__(self) -> None:
        one, other = socket.socketpair()
        self.one, self.other = ControlSocket(one), ControlSocket(other)
        self.raw = one


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.one.close()
    pair.other.close()


def test_messages_arrive_whole_and_in_order(pair):
    messages = [b"", b"a", b"b" * 100_000, b"c"]
    for message in messages:
        pair.one.send(message)
    assert pair.other.receive() == messages
    assert pair.other.receive() == []


def test_a_message_is_given_out_only_once_all_of_it_is_there(pair):
    framed = struct.pack("<I", 5) + b"hello"
    for byte in framed[:-1]:
        pair.raw.send(bytes([byte]))
        assert pair.other.receive() == []
    pair.raw.send(framed[-1:] + framed[:2])
    assert pair.other.receive() == [b"hello"]
    pair.raw.send(framed[2:])
    assert pair.other.receive() == [b"hello"]


def test_what_the_socket_does_not_take_is_kept_and_sent_later(pair):
    chance = random.Random(1)
    messages = [chance.randbytes(chance.randrange(300_000)) for _ in range(30)]
    for message in messages:
        pair.one.send(message)
    assert pair.one.unsent
    assert not pair.one.flush()
    received = []
    while len(received) < len(messages):
        received += pair.other.receive()
        pair.one.flush()
    assert received == messages
    assert not pair.one.unsent
    assert pair.one.flush()


def test_what_was_said_before_the_end_is_given_out_before_the_end(pair):
    pair.one.send(b"last words")
    pair.one.close()
    assert pair.other.receive() == [b"last words"]
    with pytest.raises(ControlClosed):
        pair.other.receive()


def test_half_a_message_at_the_end_is_dropped(pair):
    pair.raw.send(struct.pack("<I", 5) + b"hel")
    pair.one.close()
    assert pair.other.receive() == []
    with pytest.raises(ControlClosed):
        pair.other.receive()


def test_the_end_is_found_after_exactly_one_full_read(pair):
    """A read that fills its buffer looks again, and may then find the end."""
    pair.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    message = b"x" * ((1 << 18) - 4)
    pair.one.send(message)
    while pair.one.unsent:
        assert pair.other.receive() == []
        pair.one.flush()
    pair.one.close()
    assert pair.other.receive() == [message]
    with pytest.raises(ControlClosed):
        pair.other.receive()


def test_sending_to_one_that_is_gone_says_so_and_raises_no_signal(pair):
    pair.other.close()
    with pytest.raises(ControlClosed):
        pair.one.send(b"x")


def test_a_reset_connection_is_a_closed_one(pair):
    pair.one.send(b"never read")
    pair.other.close()
    with pytest.raises(ControlClosed):
        pair.one.receive()


def test_an_absurd_length_is_nonsense_and_not_memory(pair):
    pair.raw.send(struct.pack("<I", MAX_MESSAGE + 1) + b"x")
    with pytest.raises(ControlCorrupt, match=str(MAX_MESSAGE + 1)):
        pair.other.receive()
