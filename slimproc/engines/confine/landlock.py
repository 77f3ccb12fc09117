"""Landlock: which files this process may still open, no TCP, and no signals to others.

Numbers and structs: docs.kernel.org/userspace-api/landlock.html. They are the same on every architecture.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable

from slimproc.engines.confine.kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""What may stand in a rule about anything but a directory."""
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_SINCE_5 = (1 << 16) - 1
_TCP = 3  # bind and connect
_SCOPES = 3  # abstract unix sockets and signals
TCP_SINCE, SCOPES_SINCE = 4, 6

READ = _READ_FILE | _READ_DIR
RUN = _READ_FILE | _EXECUTE
DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
WRITE = _ALL_SINCE_5 & ~_EXECUTE
"""Read, write, create and remove, beneath a directory."""


def version() -> int:
    """The kernel's Landlock, 1 or higher. Raises OSError where there is none or it may not be used."""
    return syscall(_CREATE_RULESET, None, 0, _VERSION)


def restrict(rules: Iterable[tuple[str, int]]) -> int:
    """From now on this thread, and what it starts, may open only what ``rules`` say: (path, READ, RUN, DEVICE or WRITE).

    A directory's rule is for all beneath it; paths that are not there are left out. Returns the version that it has
    been done with. Needs no_new_privs. Raises OSError, and then nothing is restricted.
    """
    abi = version()
    handled = _ALL.get(abi, _ALL_SINCE_5)
    attributes = struct.pack("=QQQ", handled, _TCP if abi >= TCP_SINCE else 0, _SCOPES if abi >= SCOPES_SINCE else 0)[
        : 24 if abi >= SCOPES_SINCE else 16 if abi >= TCP_SINCE else 8
    ]
    ruleset = syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path, access in rules:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(ruleset, path, access & handled)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _OF_FILES
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, fd), 0)
    finally:
        os.close(fd)
