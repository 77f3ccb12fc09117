"""Which control groups we are in: containers and systemd's units limit CPU and memory there, and kills are counted there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class Group(NamedTuple):
    """``version`` is that of its files' names: 1 or 2."""

    version: int
    folder: str


def groups(controller: str, root: Path = ROOT) -> Iterator[Group]:
    """Those whose ``controller`` (``cpu``, ``memory``) holds for this process, the innermost first. ``root`` is for tests.

    In a container whose group is the root of all that it sees, the path in /proc is often the host's and leads nowhere:
    then only the last of the folders exists.
    """
    try:
        membership = (root / "proc/self/cgroup").read_text()
    except (OSError, UnicodeDecodeError):
        return
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, top = 2, f"{root}/sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, f"{root}/sys/fs/cgroup/{controller}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            yield Group(version, "/".join((top, *parts[:length])))
