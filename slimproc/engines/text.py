"""TextAssembler: token bytes in, text out: characters joined over token borders, stop strings cut out.

Shared by every backend, because this is where servers differ from one another by accident. Two promises: whatever was
returned is never taken back, and the pieces joined are the same however they were cut into tokens.
"""

from __future__ import annotations

import codecs

_decoder = codecs.getincrementaldecoder("utf-8")


class TextAssembler:
    """One sequence's text. ``stopped`` says that a stop string was found; its text and all after it are withheld."""

    __slots__ = ("_decode", "_decoder", "_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        """``stops`` must not contain the empty string, which would match at once."""
        self._decoder = _decoder("replace")
        self._decode = self._decoder.decode
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        """The tail that may yet turn out to begin a stop string."""
        self.stopped = False

    @property
    def plain(self) -> bool:
        """There are no stop strings, and no half of a character waits: the next whole characters are certain."""
        return not self._stops and not self._decoder.buffer

    @property
    def waiting(self) -> int:
        """Whole characters that are held back."""
        return len(self._held)

    def push(self, piece: bytes) -> str:
        """The text that is certain after ``piece``; empty while a character or a possible stop string is incomplete.

        Bytes that can never become a character are U+FFFD, one per maximal broken run as the Unicode standard says.
        """
        if self._decoder.buffer:
            text = self._decode(piece)
        else:
            # Almost every token is whole characters, and bytes.decode is five times faster than the decoder.
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                text = self._decode(piece)
        return self._cut(text) if self._stops else text

    def flush(self, *, cut: bool) -> str:
        """The text that was held back, once the sequence has ended without a stop string.

        ``cut``: a limit ended it, so half a character is dropped; otherwise the model ended in the middle of one, and
        that is U+FFFD.
        """
        tail = "" if cut and self._may_complete() else self._decode(b"", True)
        if not self._stops:
            return tail
        text, self._held = self._held + tail, ""
        at = self._first_match(text)
        if at < 0:
            return text
        self.stopped = True
        return text[:at]

    def _may_complete(self) -> bool:
        # CPython's decoder also holds back the first two bytes of a surrogate (ED A0 to ED BF), which no third byte
        # makes a character: those were broken before the limit came.
        half = self._decoder.getstate()[0]
        return not (half[:1] == b"\xed" and half[1:] >= b"\xa0")

    def _cut(self, text: str) -> str:
        # Everything before the held tail has been given out and cannot belong to a stop string, so the search looks at
        # the tail and the new text, never at the whole. The earliest match wins, in whatever order the stops were
        # given: a match waits while an earlier place could still grow into one, else the cut would depend on how the
        # text happened to be split into tokens.
        window = self._held + text
        at = self._first_match(window)
        hold = len(window) - self._possible_start(window)
        if 0 <= at <= hold:
            self.stopped = True
            self._held = ""
            return window[:at]
        self._held = window[hold:]
        return window[:hold]

    def _first_match(self, window: str) -> int:
        return min((at for stop in self._stops if (at := window.find(stop)) >= 0), default=-1)

    def _possible_start(self, window: str) -> int:
        """How many characters at the end of ``window`` could begin a stop string that is not complete yet."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
