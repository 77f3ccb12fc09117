"""What all lives of upstreams have in common: their slots, their tasks, and one end."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from slimproc import logs
from slimproc.replicas.life import Post, Refusal
from slimproc.replicas.states import ReplicaEvent
from slimproc.upstream.slot import UpstreamSlot

log = logs.get("slimproc.upstream")


@dataclass(frozen=True)
class Pace:
    """Seconds between two looks at a server; tests are in more of a hurry."""

    loading: float = 0.25
    """While it loads or comes up."""
    serving: float = 2.0
    draining: float = 0.2
    between: float = 5.0
    """While it does not run for us."""
    stuck: float = 2.0
    """After an unload that failed."""
    settle: float = 2.0
    """How long a server must stay alive whose port is answered by nobody whom we know: one that finds its port taken has
    ended by then. One that runs in a container never owns its port.
    """
    doubtful: float = 20.0
    """The same where somebody answers who was there before it. Some take so long until they find their port taken."""
    given_up: float = 5.0
    """How long after an unload that failed a server that says ready, or failed, is believed to stay so."""


class UpstreamLife(ABC):
    """A server in use. Its subclass says how it becomes ready, and posts; ``_end`` is its one end."""

    killable = True
    tokens = 0
    pid: int | None = None

    def __init__(
        self, name: str, base_url: str, concurrency: int, post: Post, on_slot_free: Callable[[], None]
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.is_ready = False
        self.ready_since = 0.0
        self.load_seconds = 0.0
        self.progress = 0.0
        self.refused: Refusal | None = None
        self.status: str | None = None
        self.unload_failed = ""
        self._concurrency = concurrency
        self._post = post
        self._on_slot_free = on_slot_free
        self._doubted = ""
        self._taken: set[UpstreamSlot] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()

    # --- slots --------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def slots(self) -> int:
        return self._concurrency if self.is_ready else 0

    @property
    def occupied(self) -> int:
        return len(self._taken)

    @property
    def in_flight(self) -> int:
        """A slot that is taken is forwarded in the same turn, or nearly."""
        return len(self._taken)

    @property
    def free_slots(self) -> int:
        return 0 if self.ended or self._doubted else max(0, self.slots - self.occupied)

    @property
    def drained(self) -> bool:
        return not self._taken

    def take_slot(self) -> UpstreamSlot:
        assert self.free_slots > 0, "the caller looks before it takes"
        slot = UpstreamSlot(self)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: UpstreamSlot) -> None:
        self._taken.discard(slot)
        if self._doubted and not self._taken:
            self._end(self._doubted)
        self._on_slot_free()

    @abstractmethod
    def note_unreachable(self, reason: str) -> None:
        """A request could not be forwarded, because nobody listens there."""

    def _doubt(self, reason: str) -> None:
        """It looks gone or unwell. It gets no more work; what it has may yet be answered, and then it is over."""
        if self._taken:
            self._doubted = reason
        else:
            self._end(reason)

    def _trust(self) -> None:
        """It looks well."""
        if self._doubted:
            self._doubted = ""
            self._on_slot_free()

    # --- becoming ready, and the end ------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{what} {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a bug ends a server's life", replica=self.name, error=repr(error))
            self._end(f"an internal error: {error!r}")

    def _become_ready(self) -> None:
        self.is_ready = True
        self.progress = 1.0
        self.ready_since = time.monotonic()
        self.load_seconds = self.ready_since - self._began
        self._post(ReplicaEvent.READY_RECEIVED, self, "")

    def _refuse(self, reason: str, *, permanent: bool = False) -> None:
        self.refused = Refusal(reason, permanent)
        self._end(reason)

    def _end(self, reason: str) -> None:
        """Once, whatever happened: nothing of it goes on, and its replica hears so."""
        if self.status is None:
            self.status = reason
            self._lose_slots(reason)
            self._post(ReplicaEvent.EXITED, self, reason)

    def _lose_slots(self, reason: str) -> None:
        for slot in list(self._taken):
            slot.lose(reason)

    def drain(self, *, begin: bool) -> None:  # noqa: B027  # most have nothing to do
        """What is not ours to know needs no drain of its own."""

    def terminate(self) -> None:
        self.kill()

    @abstractmethod
    def ask_to_exit(self) -> None: ...
    @abstractmethod
    def kill(self) -> None: ...
    def let_go(self) -> None:  # noqa: B027  # most have nothing to do
        """What is ours does not outlive us: nothing to do."""

    def give_up(self, reason: str) -> None:
        self._lose_slots(reason)

    def bury(self, reason: str) -> None:
        self.status = self.status or reason
        for task in self._tasks:
            task.cancel()
        self._lose_slots(reason)
