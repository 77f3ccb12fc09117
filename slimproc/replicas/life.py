"""What a replica owns while it runs, whatever that is: an engine, a server that we started, or a connection to one.

A replica makes one life after another from its source. A life tells its end (EXITED) once, by itself; after ``bury``
nothing of it is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from slimproc.replicas.states import ReplicaEvent


class Refusal(NamedTuple):
    """Why a life could not become ready, in its own words. ``permanent``: trying again cannot help. ``scarce``: it
    did not get the memory that it wanted.
    """

    message: str
    permanent: bool = False
    scarce: bool = False


class AnySlot(Protocol):
    """The right to one piece of a life's work; what can be done with it beside giving it back depends on the life."""

    @property
    def engine_name(self) -> str: ...
    def cancel(self) -> None:
        """Give it back, once; what it was used for is ended first."""


class Life(Protocol):
    """One running copy of a model, from its start to its burial. Everything is called in the loop; nothing may wait."""

    @property
    def name(self) -> str:
        """The replica's name."""

    @property
    def pid(self) -> int | None:
        """The leader of its process group; None where nothing of it is a child of ours."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def ready_since(self) -> float:
        """Monotonic seconds; 0.0 before it is ready."""

    @property
    def load_seconds(self) -> float:
        """How long its load took; 0.0 before it is ready."""

    @property
    def progress(self) -> float:
        """Of its load: 0.0 to 1.0."""

    @property
    def refused(self) -> Refusal | None: ...
    @property
    def status(self) -> object | None:
        """How it ended; ``str()`` is for people. None while it has not."""

    @property
    def tokens(self) -> int:
        """Generated in it; 0 where nobody can tell."""

    @property
    def slots(self) -> int:
        """How many may be taken at once; 0 before it is ready."""

    @property
    def free_slots(self) -> int: ...
    @property
    def occupied(self) -> int:
        """Slots that are taken, whether or not they are in use."""

    @property
    def in_flight(self) -> int:
        """Slots that are in use."""

    @property
    def drained(self) -> bool:
        """No slot is taken, and nobody else has work in it as far as that can be known."""

    @property
    def unload_failed(self) -> str:
        """Why it could not be unloaded, while that is so; else empty."""

    @property
    def killable(self) -> bool:
        """``terminate`` and ``kill`` end it. What is behind a network can only be asked."""

    def take_slot(self) -> AnySlot:
        """The caller looks at ``free_slots`` before, in the same turn of the loop."""

    def drain(self, *, begin: bool) -> None:
        """It gets no more work and is to become ``drained``; or (False) it serves on."""

    def ask_to_exit(self) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def let_go(self) -> None:
        """The server is going: where what is behind it lives without us, leave it as it is, and end at once."""

    def give_up(self, reason: str) -> None:
        """It was killed and does not end: what is unfinished in it fails now. Its burial comes when it does end."""

    def bury(self, reason: str) -> None:
        """After EXITED: fail what is unfinished, give everything back."""


Post = Callable[[ReplicaEvent, Life, str], None]
"""How a life tells its replica what happens to it; the text is the reason, for people."""


@dataclass(frozen=True)
class Sighting:
    """What is known of a server that lives without us, from its own words."""

    state: Literal["unknown", "unloaded", "loading", "ready", "unloading", "failed"]
    """As it was last told and still holds; ``unknown`` when the last attempt to ask failed, or there was none."""
    residency: Literal["resident", "not_resident", "unknown"] | None = None
    """The last one that it told. An attempt that fails never replaces it; being asked to load does. None: never told."""
    reason: str = ""
    """Why the state is unknown or failed."""
    last_error: tuple[str, str] | None = None
    """Its own ``last_error``: code and message."""
    asked: bool = False
    """It was asked at least once, with whatever success."""
    let_go: bool = False
    """The last that it said of itself was that it is unloaded, and it was not asked to load since."""

    @property
    def may_hold_memory(self) -> bool:
        """Who loads, unloads or has failed may, whatever it says of its memory meanwhile: that has no bound."""
        return not self.let_go


class LifeSource(Protocol):
    """Makes the lives of one replica, one at a time, and knows what outlives them."""

    @property
    def slots(self) -> int:
        """Of a life that is ready, as far as the configuration says."""

    @property
    def sighting(self) -> Sighting | None:
        """None: nothing of it can outlive a life."""

    def start(
        self, *, device: str | None, post: Post, on_slot_free: Callable[[], None], on_news: Callable[[], None]
    ) -> Life:
        """Begin a life on ``device`` (None: wherever it likes). ``on_news``: something that others look at has changed.

        Raises OSError, and then nothing is left over.
        """

    def made_from(self) -> Hashable:
        """What a life would be made from now, as far as that is seen at once: another value means another file, say."""

    async def watch(self, on_news: Callable[[], None]) -> None:
        """Between lives: keep ``sighting`` fresh until cancelled. Returns at once where there is nothing to see."""
