"""UpstreamSlot: the right to forward one request to one model server; taken at the decision, so that nobody else gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class SlotOwner(Protocol):
    """A life, as its slots see it."""

    @property
    def name(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    def give_back(self, slot: UpstreamSlot) -> None: ...
    def note_unreachable(self, reason: str) -> None: ...


class UpstreamSlot:
    """Belongs to one life of a server. The request goes to ``base_url`` and its path."""

    __slots__ = ("_owner", "base_url", "engine_name", "lost", "on_lost")

    def __init__(self, owner: SlotOwner) -> None:
        self._owner: SlotOwner | None = owner
        self.base_url = owner.base_url
        """Without a trailing slash."""
        self.engine_name = owner.name
        """The replica's name."""
        self.lost = ""
        """Why the server is gone or was ended while this was taken; empty while it is not."""
        self.on_lost: Callable[[str], None] | None = None
        """Whoever forwards may set it: it is called once, when ``lost`` gets its reason. The request is to be broken off."""

    def release(self) -> None:
        """The request has ended, however, and its connection is closed. A second time changes nothing."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.give_back(self)

    def cancel(self) -> None:
        """The same, in the word that all slots have."""
        self.release()

    def note_unreachable(self, reason: str) -> None:
        """The server could not be connected to: it is looked at now, and left out if it is gone."""
        if self._owner is not None:
            self._owner.note_unreachable(reason)

    def lose(self, reason: str) -> None:
        """For its owner: the server is gone."""
        if not self.lost:
            self.lost = reason
            if self.on_lost is not None:
                self.on_lost(reason)
