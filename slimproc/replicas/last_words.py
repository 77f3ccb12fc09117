"""LastWords: what a child writes to its standard error, line by line into our log, and its last lines kept."""

from __future__ import annotations

import asyncio
import os
from collections import deque

from slimproc import logs

_LAST_LINES = 40
_LINE_LIMIT = 1000
_PIECE = 1 << 16
_FATAL = "Fatal Python error"
_LAST_PIECES = 64
"""What is still read after a death. A child's pipe holds one piece; what writes more than this is not our child."""


class LastWords:
    """Reads the pipe ``fd``, which it owns, without ever waiting. Each line becomes a line of ``log``."""

    def __init__(self, fd: int, name: str, log: logs.Log) -> None:
        self._fd = fd
        self._name = name
        self._log = log
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._last = ""
        self._dumping = False
        self._partial = b""
        self._open = True
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Take one piece at each wake-up, since a child may write faster than we log. True: there may be more."""
        try:
            data = os.read(self._fd, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._fd)
        *lines, self._partial = (self._partial + (data or b"\n")).split(b"\n")
        self._partial = self._partial[-_LINE_LIMIT:]
        for line in lines:
            self._note(line)
        return bool(data)

    def _note(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip()
        if text:
            self._lines.append(text)
            # A native library says what went wrong; the stacks that Python's faulthandler prints then say only where.
            self._dumping = self._dumping or text.startswith(_FATAL)
            if not self._dumping or not self._last:
                self._last = text
            self._log.info(text, replica=self._name)

    def read_what_is_left(self) -> None:
        """After the child's death."""
        for _ in range(_LAST_PIECES):
            if not self._read():
                return

    @property
    def last_line(self) -> str:
        """The last one that says anything: of a crash, the one before Python's own report of it."""
        return self._last

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
