"""What the routes ask of residency: which devices there are, what is held, and to have models loaded and unloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slimproc.residency.views import DeviceReport, Explanation


class Residency(Protocol):
    """Everything returns at once. A model is called by its configured name."""

    def devices(self) -> Sequence[DeviceReport]: ...
    def held(self, model: str) -> int:
        """Bytes that are kept for it."""

    def preloading(self, model: str) -> bool:
        """It is to be loaded at the start, and has not been yet."""

    def obstacle(self, model: str) -> str:
        """Why it can be loaded nowhere, by the word of the devices and their driver; empty: it may be."""

    @property
    def driver_fault(self) -> str:
        """What is wrong with the GPUs' driver as a whole; empty: nothing."""

    def explain(self, model: str) -> Explanation:
        """What would happen, or does, if somebody asked for it now."""

    def load(self, model: str) -> None:
        """An operator wants it in memory; earlier failures do not count."""

    def unload(self, model: str) -> None:
        """An operator wants it out: what it has to do may take ``drain_timeout``."""
