"""One hold: how many bytes it is in each of its states. The ledger owns them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slimproc.residency.views import Claim

HEADROOM = 1.05
"""On top of the high-water mark of a unit that nobody has measured: buffers still grow a little after the first request."""


@dataclass(frozen=True)
class Hold:
    """One hold as it is now. ``bytes`` and ``attributed`` are private; ``claim.file_bytes`` come on top, shared."""

    owner: str
    device: str
    claim: Claim
    state: Literal["loading", "resident", "releasing", "residue"]
    since: float
    bytes: int
    attributed: int


@dataclass
class Entry:
    owner: str
    device: str
    claim: Claim
    since: float
    asked: int
    state: Literal["loading", "resident", "releasing", "residue"] = "loading"
    changed: float = 0.0
    """When ``state`` began."""
    leader: int | None = None
    attributed: int = 0
    last: int = 0
    """The newest ``attributed`` that was not 0."""
    load_high: int = 0
    run_high: int = 0
    others: int | None = None
    """Bytes that nobody of ours had when this one was last seen to have some."""

    @property
    def bytes(self) -> int:
        if self.state == "residue":
            return self.claim.residual
        if self.state == "loading":
            return max(self.asked, self.load_high)
        if self.state == "releasing":
            return self.asked
        if self.claim.source != "estimated":
            return max(self.claim.run_peak, self.run_high)
        if not self.run_high:
            return self.asked
        roomy = int(self.run_high * HEADROOM)
        # More than was let in only when more was seen: others have been promised the rest.
        return roomy if self.run_high > self.asked else min(roomy, self.asked)

    def snapshot(self) -> Hold:
        return Hold(self.owner, self.device, self.claim, self.state, self.since, self.bytes, self.attributed)

    @property
    def outstanding(self) -> int:
        return max(0, self.bytes - self.attributed)


@dataclass(frozen=True)
class Ended:
    """Somebody left ``device``: bytes that are nobody's are to come down to ``target``, for now they are ``bytes`` more."""

    at: float
    device: str
    bytes: int
    target: int


def mapped_files(entries: Iterable[Entry]) -> dict[str, int]:
    """The bytes of each file that one of the holds maps."""
    files: dict[str, int] = {}
    for entry in entries:
        if entry.claim.file is not None and entry.state != "residue":
            files[entry.claim.file] = max(entry.claim.file_bytes, files.get(entry.claim.file, 0))
    return files
