"""Keeps who holds how many bytes where, against the newest sample of the devices. Synchronous; the caller gives instants.

What may be promised to somebody new on a device is ``free - Σ max(0, hold - attributed) - files - margin``:

* Bytes that a process of ours already has are missing in ``free``, so of its hold only the rest is taken off. Where the
  device cannot say whose its bytes are, and for servers that are not our children, nothing is attributed and the whole
  hold is taken off: too much rather than too little.
* A mapped file still counts as free on the host (its pages can be dropped, and would be read again and again), so its
  bytes are taken off in full, once for all holds that map it.
* A hold is there before its process is spawned, and outlives it until a sample that was taken after the end.
* The host and unified devices are one pool of memory: holds on any of them are taken off all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from slimproc.residency.holds import HEADROOM, Ended, Entry, Hold, mapped_files
from slimproc.residency.views import HOST, Claim, DeviceSample, DeviceView, Sample

GPU_MARGIN = 1 << 30
HOST_MARGIN = 0.05

BACK = 0.95
"""Of the bytes of somebody who left, this share must be free again for the device to have recovered; the rest is noise."""


class Ledger:
    """Holds by owner. ``margin``: bytes that stay free on each device; None: 1 GiB on a GPU, 5 % of the host's."""

    def __init__(self, margin: int | None, max_sample_age: float, recovery: float = 5.0) -> None:
        self._margin = margin
        self._max_sample_age = max_sample_age
        self._recovery = recovery
        self._sample: Sample | None = None
        self._active: dict[str, Entry] = {}
        self._releasing: list[Entry] = []
        self._residues: dict[str, Entry] = {}
        self._ended: list[Ended] = []
        self._last_end: dict[str, float] = {}

    def reconfigure(self, margin: int | None, max_sample_age: float) -> None:
        self._margin, self._max_sample_age = margin, max_sample_age

    # --- what is measured ---------------------------------------------------------------------------------------------

    def observe(self, sample: Sample) -> bool:
        """Take a sample for the present state. False: it is not newer than the last one, and changed nothing."""
        if self._sample is not None and sample.taken <= self._sample.taken:
            return False
        self._sample = sample
        for entry in self._entries():
            self._measure(entry)
        for entry in self._entries():
            if entry.attributed:
                entry.last, entry.others = entry.attributed, self._unattributed(entry.device)
        self._release(sample.taken)
        return True

    def _measure(self, entry: Entry) -> None:
        """Read what the newest sample says about ``entry``."""
        entry.attributed = 0
        device = self._sample.devices.get(entry.device) if self._sample is not None else None
        if device is None or device.attributed is None or entry.leader is None or self._sample is None:
            return
        entry.attributed = device.attributed.get(entry.leader, 0)
        # Of a unit that names no file the mapped bytes belong to what it needs; they are in nobody's ``file_bytes``.
        mapped = device.mapped.get(entry.leader, 0) if entry.claim.file is None else 0
        seen = entry.attributed + mapped
        if entry.state == "loading":
            entry.load_high = max(entry.load_high, seen)
        elif entry.state == "resident" and self._sample.taken > entry.changed:
            entry.run_high = max(entry.run_high, seen)

    def _release(self, taken: float) -> None:
        gone = [entry for entry in self._releasing if taken > entry.changed]
        self._releasing = [entry for entry in self._releasing if taken <= entry.changed]
        for entry in gone:
            if entry.claim.residual and entry.owner not in self._active:
                entry.state, entry.attributed = "residue", 0
                self._residues[entry.owner] = entry

    # --- who holds ----------------------------------------------------------------------------------------------------

    def hold(self, owner: str, device: str, claim: Claim, now: float, bytes: int | None = None) -> None:  # noqa: A002 - what it is
        """Hold ``bytes`` (None: the claim's peak) and the claim's file, before anything is started."""
        assert owner not in self._active, f"{owner} holds already"
        asked = claim.peak if bytes is None else bytes
        if owner in self._residues and self._residues[owner].device == device:
            del self._residues[owner]
        self._active[owner] = Entry(owner, device, claim, since=now, asked=asked, changed=now)

    def attach(self, owner: str, leader: int | None) -> None:
        """The process group whose bytes count against the hold; None: nobody's (a server that is not our child)."""
        entry = self._active[owner]
        entry.leader = leader
        self._measure(entry)

    def resident(self, owner: str, now: float) -> None:
        """Loading is over: from now on the hold is what it needs to run."""
        entry = self._active[owner]
        if entry.state != "resident":
            entry.state, entry.changed, entry.run_high = "resident", now, 0

    def lost(self, owner: str, now: float, *, took_all: bool = False) -> None:
        """The process died but will be started again: the hold stays, the device has to be looked at anew. ``took_all``:
        it was ended for its memory, so that what it was seen to have says nothing about what it needs.
        """
        entry = self._active[owner]
        if took_all:
            entry.load_high = entry.run_high = 0
        self._note_end(entry, now)
        entry.leader, entry.attributed, entry.last, entry.others = None, 0, 0, None

    def reload(self, owner: str, now: float) -> bool:
        """Make the hold one for loading again, as before a restart. False, and nothing changed: it does not fit now."""
        entry = self._active[owner]
        view = self.view(entry.device, now)
        more = max(entry.claim.peak, entry.asked) - entry.bytes
        if view is None or view.fault or not view.fresh or view.available < max(0, more):
            return False
        self.load_again(owner, now)
        return True

    def load_again(self, owner: str, now: float) -> None:
        """Make the hold one for loading again, whether or not it fits."""
        entry = self._active[owner]
        entry.state, entry.changed = "loading", now
        entry.load_high = 0

    def end(self, owner: str, now: float) -> None:
        """The process is gone, or its server said that it is unloaded. No error if there is no hold (any more)."""
        entry = self._active.pop(owner, None)
        if entry is None:
            return
        self._note_end(entry, now)
        entry.asked = entry.bytes
        entry.state, entry.changed = "releasing", now
        self._releasing.append(entry)

    def forget(self, owner: str, now: float) -> None:
        """The owner is no more, nor has it left anything behind."""
        self.end(owner, now)
        self._residues.pop(owner, None)
        for entry in self._releasing:
            if entry.owner == owner:
                entry.claim = replace(entry.claim, residual=0)

    def _note_end(self, entry: Entry, now: float) -> None:
        self._last_end[entry.device] = max(now, self._last_end.get(entry.device, now))
        if entry.device == HOST:
            return  # the host has a process's memory back before anybody can know of its end
        self._ended = [ended for ended in self._ended if now - ended.at < self._recovery]
        expected = entry.last or max(0, entry.bytes - entry.claim.residual)
        target = entry.others if entry.others is not None else self._unattributed(entry.device) - expected
        self._ended.append(Ended(now, entry.device, expected, target))

    # --- what is left -------------------------------------------------------------------------------------------------

    def view(self, device: str, now: float) -> DeviceView | None:
        """One device; None: no sample has it."""
        sample = self._sample.devices.get(device) if self._sample is not None else None
        if sample is None or self._sample is None:
            return None
        pool = self._pool(device)
        entries = [entry for entry in self._entries() if entry.device in pool]
        files = sum(mapped_files(entries).values())
        margin = self._margin_of(sample)
        ended = max((self._last_end.get(each, float("-inf")) for each in pool), default=float("-inf"))
        return DeviceView(
            device=device,
            kind=sample.kind,
            total=sample.total,
            free=sample.free,
            margin=margin,
            held=sum(entry.bytes for entry in entries) + files,
            available=sample.free - sum(entry.outstanding for entry in entries) - files - margin,
            external=self._external(device, sample, now),
            fresh=now - self._sample.taken <= self._max_sample_age and self._sample.taken > ended,
            recovering=any(self._lingers(each, now) for each in pool),
            fault=sample.fault,
        )

    def views(self, now: float) -> dict[str, DeviceView]:
        """Every device of the newest sample."""
        if self._sample is None:
            return {}
        found = ((device, self.view(device, now)) for device in self._sample.devices)
        return {device: view for device, view in found if view is not None}

    def seen(self, owner: str) -> Claim | None:
        """What a later load of the same should claim; None while that is not known: not resident, or nothing attributed."""
        entry = self._active.get(owner)
        if entry is None or not entry.run_high:
            return None
        claim = entry.claim
        return Claim(
            load_peak=int(max(entry.load_high, entry.run_high) * HEADROOM),
            run_peak=int(entry.run_high * HEADROOM),
            residual=claim.residual,
            file=claim.file,
            file_bytes=claim.file_bytes,
            source="measured",
        )

    def held(self, owner: str) -> int:
        """Private bytes held for the owner now; of one that was unloaded, its residue."""
        entry = self._active.get(owner) or self._residues.get(owner)
        return entry.bytes if entry else 0

    def attributed(self, owner: str) -> int:
        """Private bytes that its processes were last seen to have on its device."""
        entry = self._active.get(owner)
        return entry.attributed if entry else 0

    def holds(self) -> list[Hold]:
        """All holds, also of those who have left and of whom no later sample has come yet."""
        return [entry.snapshot() for entry in self._entries()]

    def statistics(self, now: float) -> dict[str, dict[str, int]]:
        """Bytes by device and kind: total, free, held, available, external."""
        kinds = ("total", "free", "held", "available", "external")
        return {device: {kind: getattr(view, kind) for kind in kinds} for device, view in self.views(now).items()}

    def __repr__(self) -> str:
        holds = ", ".join(f"{e.owner} {e.state} {e.bytes} on {e.device}" for e in self._entries())
        return f"<Ledger {holds or 'empty'}>"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _entries(self) -> Iterator[Entry]:
        yield from self._active.values()
        yield from self._releasing
        yield from self._residues.values()

    def _pool(self, device: str) -> set[str]:
        """The devices whose memory is the same as this one's."""
        devices: Mapping[str, DeviceSample] = self._sample.devices if self._sample is not None else {}
        shared = {HOST} | {name for name, each in devices.items() if each.kind == "unified"}
        return shared if device in shared else {device}

    def _margin_of(self, sample: DeviceSample) -> int:
        if self._margin is not None:
            return self._margin
        return int(sample.total * HOST_MARGIN) if sample.kind == "host" else GPU_MARGIN

    def _unattributed(self, device: str) -> int:
        """Bytes in use on the device that are attributed to nobody of ours."""
        sample = self._sample.devices.get(device) if self._sample is not None else None
        if sample is None:
            return 0
        return sample.total - sample.free - sum(e.attributed for e in self._entries() if e.device == device)

    def _lingers(self, device: str, now: float) -> bool:
        """Whether somebody left so short a time ago that its bytes may still come back, and they are not all back."""
        unattributed = self._unattributed(device)
        return any(
            ended.device == device
            and now - ended.at < self._recovery
            and unattributed - self._came_after(ended) - ended.target > ended.bytes * (1 - BACK)
            for ended in self._ended
        )

    def _came_after(self, ended: Ended) -> int:
        """Bytes that units which came after somebody's end may have taken, where nothing is attributed to them."""
        return sum(
            entry.bytes
            for entry in self._active.values()
            if entry.device == ended.device and entry.since >= ended.at and not entry.attributed
        )

    def _external(self, device: str, sample: DeviceSample, now: float) -> int:
        if sample.attributed is None:
            return 0
        ours = sum(e.bytes for e in self._entries() if e.device == device and not e.attributed)  # they may be in it
        if self._lingers(device, now):
            ours += sum(e.bytes for e in self._ended if e.device == device and now - e.at < self._recovery)
        return max(0, self._unattributed(device) - ours)
