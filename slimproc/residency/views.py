"""What residency decides from and decides on, as plain values. Bytes and monotonic seconds throughout.

A *unit* is one replica as the ledger and planning see it: something that can be put into memory and taken out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

HOST = "host"
"""The device that is the machine's own memory. Every other device is a GPU or a MIG instance, named by its UUID."""


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceSample:
    """One device at one instant."""

    kind: Literal["host", "gpu", "unified"]
    """``unified``: a GPU whose memory is the machine's; its ``free`` is the smaller of what both say."""
    name: str
    total: int
    free: int
    attributed: Mapping[int, int] | None = field(default_factory=dict)
    """Bytes by the leader of a process group of ours. On the host: private bytes alone, since a mapped file still counts as
    free. None: the device cannot say whose its bytes are.
    """
    mapped: Mapping[int, int] = field(default_factory=dict)
    """Host only: bytes of files that a group has mapped and that are in memory now."""
    fault: str = ""
    """Why nothing may be loaded here (``lost``, ``driver_mismatch``, ``unknown: …``); empty while all is well."""
    index: int | None = None
    """Of a GPU: its number in the order of the PCI bus, which the instances of one GPU share."""


@dataclass(frozen=True)
class Sample:
    """All devices at one instant. One that is missing is not there (any more)."""

    taken: float
    devices: Mapping[str, DeviceSample]


@dataclass(frozen=True)
class DeviceReport:
    """One device for people to look at, as it was last sampled. Bytes."""

    id: str
    """``host``, or a GPU's UUID."""
    kind: Literal["host", "gpu", "unified"]
    name: str
    total: int
    free: int
    taken: float
    """When it was sampled (monotonic seconds)."""
    fresh: bool
    available: int = 0
    """What may be promised to somebody new."""
    held: int = 0
    fault: str = ""


# --- what is kept -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """How much one unit needs. ``file_bytes`` of ``file`` are mapped: units that map the same file on a device share them."""

    load_peak: int
    """Private bytes at most while it loads."""
    run_peak: int
    """Private bytes at most while it serves."""
    residual: int = 0
    """What an upstream keeps when it is unloaded."""
    file: str | None = None
    file_bytes: int = 0
    source: Literal["configured", "measured", "estimated"] = "estimated"

    @property
    def peak(self) -> int:
        """Both peaks are bounds: who is let in must fit at either."""
        return max(self.load_peak, self.run_peak)


@dataclass(frozen=True)
class DeviceView:
    """A device as a decision sees it: its latest sample against the ledger's holds."""

    device: str
    kind: Literal["host", "gpu", "unified"]
    total: int
    free: int
    margin: int
    held: int
    """The sum of all holds, shared files counted once."""
    available: int
    """free - Σ max(0, hold - attributed) - margin: what may be promised to somebody new. Negative when others took it."""
    external: int
    """At least so many bytes are taken by processes that are not ours, as far as that can be told; 0 where it cannot."""
    fresh: bool
    """The sample is younger than ``memory.max_sample_age``, and was taken after the last unload here."""
    recovering: bool
    """Something was unloaded here so short a time ago that the device may not yet show it: no refusal on its word."""
    fault: str = ""


class Phase(enum.Enum):
    """Where a unit is. It has a hold in every phase but ABSENT and FAILED (UNKNOWN: if it had one before)."""

    ABSENT = "absent"
    LOADING = "loading"
    """Also in back-off after a crash: its hold is kept, and it may be evicted at once."""
    RESIDENT = "resident"
    DRAINING = "draining"
    LEAVING = "leaving"
    """Being unloaded, until its process is gone or its server has said so."""
    FAILED = "failed"
    """Given up, and holds nothing. Not to be loaded until it may be tried again (then it is ABSENT)."""
    UNKNOWN = "unknown"
    """A remote one of which nobody knows what it holds. With a hold it is taken to have that much and is never evicted;
    without one it blocks every load on its device but those of other unknown ones, whose servers must be asked to know.
    """


@dataclass(frozen=True)
class UnitView:
    """``devices``: where it may be, best first; ``device``: where its hold is."""

    name: str
    model: str
    phase: Phase
    claim: Claim
    devices: tuple[str, ...] = (HOST,)
    device: str | None = None
    hold: int = 0
    """Private bytes held for it now (its ``claim.file_bytes`` come on top, shared)."""
    attributed: int = 0
    """Private bytes that its process group was last seen to have on ``device``."""
    busy: int = 0
    """Requests in it; it is never cut off while there are any."""
    pinned: bool = False
    resident_since: float = 0.0
    idle_since: float = 0.0
    """When its last request ended, or it became ready."""
    min_resident: float = 0.0
    ttl: float | None = None
    drained_for: str | None = None
    """The model that the drain is to make room for; None: no eviction (a ttl, an operator, a shutdown)."""
    expired: bool = False
    """It is DRAINING because nobody wanted it for its ``ttl``: it serves on if its model is wanted after all."""
    asked: bool = True
    """False: a server that is not ours, and that nobody has asked yet what it has. It is being asked."""
    failed: bool = False
    """Given up so short a time ago that it is not to be tried again, whether or not it may still hold something."""
    backing_off: bool = False
    """It is LOADING, and waits for its next start after a death: nobody counts on it, and it may go without a drain."""
    killed: bool = False
    """It is LEAVING, and hangs: its bytes do not come back, but it takes no more, so that others may be loaded beside it."""
    note: str = ""
    """For people: the phase's reason, such as an unload that failed."""


@dataclass(frozen=True)
class Demand:
    """Somebody wants a model. ``since``: the arrival of the oldest request that waits for it."""

    model: str
    since: float
    waiting: int = 1
    preload: bool = False
    """Wanted at the start by no request: it evicts nobody, is never refused, and goes after every request."""


# --- what is decided --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Hold ``hold`` bytes (and the claim's file) on ``device``, then start the unit."""

    unit: str
    device: str
    hold: int


@dataclass(frozen=True)
class Evict:
    """Drain the unit, then unload it, to make room for a model."""

    unit: str
    by: str


@dataclass(frozen=True)
class Expire:
    """Unload a unit that nobody has asked for during its ``ttl``."""

    unit: str


@dataclass(frozen=True)
class Abandon:
    """Stop draining the unit: it serves on. Its bytes are no longer needed, or its own model is wanted first."""

    unit: str


RefuseCode = Literal["insufficient_memory", "lifecycle_pending", "not_ready"]


@dataclass(frozen=True)
class Refuse:
    """Tell everybody who waits for the model that it cannot be had. ``code`` is an error's in ``errors.py``."""

    model: str
    code: RefuseCode
    explanation: Explanation


Action = Load | Evict | Expire | Abandon | Refuse


Verdict = Literal["resident", "loading", "load", "evict", "wait", "refuse"]


@dataclass(frozen=True)
class Explanation:
    """Why a model is, will be or cannot be in memory: the answer of ``slimproc plan``, and the body of the 503."""

    model: str
    verdict: Verdict
    reason: str
    """One sentence for people."""
    device: str | None = None
    needed: int = 0
    available: int = 0
    total: int = 0
    victims: Sequence[str] = ()
    """Units that would go, or are going."""
    code: RefuseCode | None = None
    """Of a refusal: what stands in the way. None where the model itself has failed."""


@dataclass(frozen=True)
class World:
    """Everything that a plan depends on."""

    now: float
    devices: Mapping[str, DeviceView]
    units: Sequence[UnitView]
    demands: Sequence[Demand] = ()
    strict: bool = False
    """``order: strict``: only the oldest demand is looked at."""


@dataclass(frozen=True)
class Plan:
    actions: Sequence[Action]
    explanations: Mapping[str, Explanation]
    """By model, of every model that is demanded."""
    wake_at: float | None = None
    """When to plan again though nothing has happened: a ttl or ``min_resident`` that ends; None: not for that."""
