"""Log lines, as text for people or JSON for machines, that no caller's words can forge; and request ids.

Standard logging does the work. A line is a constant message and fields; whatever came from outside goes into a field.
Prompts and answers go into none: that is the business of whoever logs.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import stat
import sys
import time
from typing import Any, Final, TextIO

import msgspec

LEVELS: Final = ("debug", "info", "warning", "error")
LONGEST: Final = 1000
"""Characters of a message or a value; the rest is cut off and marked with ``...``."""
LONGEST_TRACEBACK: Final = 16_000
"""Characters. Its end is what is kept: there is the error."""

_UNSAFE: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: line ends, and what a terminal obeys
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line and paragraph separators, and what turns text around
    "\ud800-\udfff"  # lone surrogates cannot be written at all
    "]"
)
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_NEEDS_QUOTES: Final = re.compile(r'[\s"=\\]')
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_to_json = msgspec.json.Encoder().encode


class Log:
    """One part of the program's logger: ``log.info("model loaded", model=name, seconds=1.5)``. No method raises."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        self._write(logging.ERROR, message, fields)

    def exception(self, message: str, /, **fields: object) -> None:
        """An error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, message, fields, exc_info=True)

    def _write(self, level: int, message: str, fields: dict[str, object], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"fields": fields}, exc_info=exc_info)


def get(name: str) -> Log:
    """The log of a module; ``name`` begins with ``slimproc``."""
    return Log(name)


def configure(level: str, *, json: bool = False, stream: TextIO | None = None) -> None:
    """Send all logging to ``stream`` (stderr) in one form; calling it again replaces the form.

    ``level`` is one of LEVELS (ValueError) and holds for us; libraries are heard from WARNING on, unless we debug.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(handler)
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("slimproc").setLevel(level.upper())


def make_request_id() -> str:
    """A new id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def accept_request_id(header: str | None) -> str:
    """The caller's own id where it is harmless (1 to 64 of ``A-Za-z0-9._-``), else a new one."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else make_request_id()


def escape(text: str) -> str:
    """``text`` as one line that a terminal shows and does not obey."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return _NAMED.get(match.group()) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines, and lets nothing that goes wrong in doing so reach the program: not a closed stderr, and not one that
    is a pipe which nobody reads: that would stop the one thread of the front. What it does not take is lost, and counted.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._fd = _waiting_fd(stream)
        self._lost = 0
        self._cut = ""
        """What ends a line of which only the beginning was taken."""
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
            if self._fd is not None:
                self._write_if_read(self._fd, line)
                return
            try:
                self.stream.write(line)
            except UnicodeEncodeError:
                self.stream.write(line.encode("ascii", "backslashreplace").decode())
            self.flush()
        except Exception:  # noqa: BLE001, S110  # there is nowhere left to tell it
            pass

    def _write_if_read(self, fd: int, line: str) -> None:
        """A pipe that is not full takes PIPE_BUF bytes without making anybody wait (POSIX, and pipe(7))."""
        text = f"{self._cut}{self._lost} log lines were lost: nobody read them\n{line}" if self._lost else line
        data = text.encode("utf-8", "backslashreplace")
        for start in range(0, len(data), select.PIPE_BUF):
            if not self._poll.poll(0):
                self._lost += 1
                self._cut = "\n" if start else self._cut
                return
            os.write(fd, data[start : start + select.PIPE_BUF])
        self._lost, self._cut = 0, ""


def _waiting_fd(stream: TextIO) -> int | None:
    """The descriptor behind ``stream``, if a write to it can wait for somebody to read."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    return fd if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode) else None


class _TextFormatter(logging.Formatter):
    """``13:08:02.169 INFO    message key=value``; None is left out; a traceback follows on indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = escape(_clip(record.getMessage()))
        parts = [f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {message}"]
        parts += [f"{key}={_text_value(value)}" for key, value in _fields(record).items() if value is not None]
        return "\n".join([" ".join(parts), *("    " + escape(line) for line in _traceback(record, self).splitlines())])


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, the fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _writable(_clip(record.getMessage())),
        }
        for key, value in _fields(record).items():
            line[key + "_" if key in line else key] = _json_value(value)
        if traceback := _traceback(record, self):
            line["exception"] = _writable(traceback)
        # JSON leaves C1, U+2028 and the like as they are; they stand inside strings only, where an escape may stand.
        return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", _to_json(line).decode())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _traceback(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return formatter.formatException(record.exc_info)[-LONGEST_TRACEBACK:]


def _text_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    text = _clip(_string(value))
    if text and not _NEEDS_QUOTES.search(text) and not _UNSAFE.search(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escape(quoted)}"'


def _json_value(value: object) -> str | int | float | bool | None:
    match value:
        case None | bool() | float():
            return value
        case int() if abs(value) < 1 << 63:
            return int(value)
    return _writable(_clip(_string(value)))


def _string(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # a bad __str__ must not cost the line
        return f"<{type(value).__name__}>"


def _clip(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def _writable(text: str) -> str:
    """Without lone surrogates, which no encoder takes."""
    return text.encode("utf-8", "backslashreplace").decode()
