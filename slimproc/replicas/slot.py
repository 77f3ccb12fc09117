"""Slot: the right to start one sequence in one engine; taken at the decision, so that nobody else gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slimproc.ipc import wire
from slimproc.stream import TokenStream


class SlotOwner(Protocol):
    """The incarnation, as its slots see it."""

    name: str

    @property
    def model(self) -> wire.ModelInfo: ...
    def start(self, stream: TokenStream, submit: Callable[[int], wire.Start]) -> int: ...
    def give_back(self) -> None: ...
    def cancel(self, rid: int) -> None: ...


class Slot:
    """Belongs to one incarnation and ends with it: started in one that has died, its stream fails as if it had been in it."""

    __slots__ = ("_engine", "rid")

    def __init__(self, engine: SlotOwner) -> None:
        self._engine = engine
        self.rid: int | None = None

    @property
    def model(self) -> wire.ModelInfo:
        return self._engine.model

    def is_of(self, engine: object) -> bool:
        return self._engine is engine

    @property
    def engine_name(self) -> str:
        return self._engine.name

    def start(self, stream: TokenStream, submit: Callable[[int], wire.Start]) -> None:
        """Start a sequence; ``submit`` makes the command for the number it is given. It ends in ``stream``."""
        self.rid = self._engine.start(stream, submit)

    def cancel(self) -> None:
        """Give the slot back, now if nothing was started, else when the engine says that it has stopped."""
        if self.rid is None:
            self._engine.give_back()
        else:
            self._engine.cancel(self.rid)
