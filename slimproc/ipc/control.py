"""The control socket's framing: a little-endian u32 length, then one msgpack message. The same on both sides."""

from __future__ import annotations

import socket
import struct
from collections import deque

_LENGTH = struct.Struct("<I")
MAX_MESSAGE = 64 << 20
"""Bytes. A prompt is bounded by the HTTP body limit, far below; more than this is not our peer speaking."""
_RECEIVE = 1 << 18


class ControlClosed(Exception):
    """The other side is gone."""


class ControlCorrupt(Exception):
    """What the other side sends are no messages of ours."""


class ControlSocket:
    """A non-blocking end of the socketpair. Nothing here ever waits: the owner polls ``fd`` and calls back in."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.fd = sock.fileno()
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()

    def receive(self) -> list[bytes]:
        """The complete messages that have arrived.

        Raises ControlClosed once the other side is gone and all that it said has been given out; ControlCorrupt.
        """
        try:
            while data := self._socket.recv(_RECEIVE):
                self._incoming += data
                if len(data) < _RECEIVE:
                    return self._take_messages()
        except BlockingIOError:
            return self._take_messages()
        except OSError:
            pass  # reset: as good as closed
        messages = self._take_messages()
        if not messages:
            raise ControlClosed
        return messages

    def _take_messages(self) -> list[bytes]:
        messages = []
        at = 0
        while len(self._incoming) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, at)
            if length > MAX_MESSAGE:
                raise ControlCorrupt(f"a message of {length} bytes is announced")
            start = at + _LENGTH.size
            if len(self._incoming) - start < length:
                break
            at = start + length
            messages.append(bytes(self._incoming[start:at]))
        del self._incoming[:at]
        return messages

    def send(self, message: bytes) -> None:
        """Send, or keep what the socket does not take yet. Raises ControlClosed."""
        framed = memoryview(_LENGTH.pack(len(message)) + message)
        self._outgoing.append(framed)
        if len(self._outgoing) == 1:
            self.flush()

    def flush(self) -> bool:
        """Send what was kept; True when nothing is left. Raises ControlClosed."""
        while self._outgoing:
            part = self._outgoing[0]
            try:
                sent = self._socket.send(part)
            except BlockingIOError:
                return False
            except OSError:
                raise ControlClosed from None
            if sent < len(part):
                self._outgoing[0] = part[sent:]
                return False
            self._outgoing.popleft()
        return True

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing)

    def close(self) -> None:
        self._socket.close()
