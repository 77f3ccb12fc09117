"""Room: the bytes of all devices while one plan is being made, now and after everybody who is on the way out has left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slimproc.residency.views import HOST, DeviceView, Phase, UnitView, World

HOLDING = frozenset({Phase.LOADING, Phase.RESIDENT, Phase.DRAINING, Phase.LEAVING})
"""The phases of a unit that has its bytes, and that may give them back."""


@dataclass(frozen=True)
class Place:
    """A unit that could be loaded, and a device that it could be on."""

    unit: UnitView
    device: str


@dataclass
class Account:
    """One pool of memory: what may still be promised there, and who maps which file."""

    bytes: int
    files: Counter[str] = field(default_factory=Counter)
    vague: int = 0
    """Holds of those counted as gone whose bytes were attributed to nobody, so that more may come back than the hold."""

    def copy(self) -> Account:
        return Account(self.bytes, Counter(self.files), self.vague)


class Room:
    """Three accounts a pool. ``start``: as it is. ``now``: less what this plan loads. ``later``: when everybody who is on
    the way out, or was chosen to go, has gone, less what older demands wait for.

    Who loads must fit both ``now`` and ``later``: that is how a younger demand never takes what an older one waits for.
    """

    def __init__(self, world: World) -> None:
        self.devices = world.devices
        self._units = world.units
        self._file_bytes: dict[str, int] = {}
        self.start: dict[str, Account] = {}
        self._unexplained: dict[str, int] = {}
        for device, view in world.devices.items():
            self._open(device, view)
        for unit in world.units:
            self._count(unit)
        self.now = {pool: account.copy() for pool, account in self.start.items()}
        self.later = {pool: account.copy() for pool, account in self.start.items()}

    def _open(self, device: str, view: DeviceView) -> None:
        pool = self.pool(device)
        known = self.start.get(pool)
        if known is None or view.available < known.bytes:
            self.start[pool] = Account(view.available)
        self._unexplained[pool] = max(self._unexplained.get(pool, 0), view.total - view.free)

    def _count(self, unit: UnitView) -> None:
        if unit.claim.file is not None:
            known = self._file_bytes.get(unit.claim.file, 0)
            self._file_bytes[unit.claim.file] = max(known, unit.claim.file_bytes)
        if unit.device is None or unit.device not in self.devices:
            return
        pool = self.pool(unit.device)
        self._unexplained[pool] = max(0, self._unexplained[pool] - unit.attributed)
        if unit.claim.file is not None and (unit.phase in HOLDING or (unit.phase is Phase.UNKNOWN and unit.hold)):
            self.start[pool].files[unit.claim.file] += 1

    # --- questions ----------------------------------------------------------------------------------------------------

    def pool(self, device: str) -> str:
        """The name of the memory that the device has: the host's and that of unified devices is one."""
        view = self.devices.get(device)
        return HOST if view is not None and view.kind != "gpu" else device

    def holders(self, device: str) -> list[UnitView]:
        """The units that have bytes in the device's memory and may give them back."""
        pool = self.pool(device)
        return [
            unit
            for unit in self._units
            if unit.phase in HOLDING and unit.device is not None and self.pool(unit.device) == pool
        ]

    def limit(self, device: str) -> int:
        """The most that could ever be promised there."""
        pool = self.pool(device)
        return min(view.total - view.margin for name, view in self.devices.items() if self.pool(name) == pool)

    def settled(self, device: str) -> bool:
        """The samples show all that happened there: it is fresh, and nobody's bytes are still on the way back."""
        return self.fresh(device) and not self.devices[device].recovering

    def fresh(self, device: str) -> bool:
        pool = self.pool(device)
        return all(view.fresh for name, view in self.devices.items() if self.pool(name) == pool)

    def need(self, account: Account, unit: UnitView, device: str, gone: Counter[str] | None = None) -> int:
        """Bytes that loading the unit takes from the account, once the ``gone`` holders of files have left."""
        # Of a unit that is not placed, a residue is where it always is, or nobody knows on which of its devices.
        where = unit.device or (unit.devices[0] if len(unit.devices) == 1 else None)
        mine = unit.hold if where is not None and self.pool(where) == self.pool(device) else 0
        file = unit.claim.file
        shared = file is not None and account.files[file] > (gone[file] if gone else 0)
        return max(0, unit.claim.peak - mine) + (0 if shared else unit.claim.file_bytes)

    def short(
        self, account: Account, unit: UnitView, device: str, victims: Sequence[UnitView] = (), *, hopeful: bool = False
    ) -> int:
        """Bytes that are missing for the unit when the victims have gone; it fits when this is 0 or less.

        ``hopeful``: also count what bytes of theirs that nobody could attribute may come back beyond their holds. The hold
        of a server that is not our child is taken off although its bytes are missing in ``free`` as well, so that only
        its leaving shows how much there is.
        """
        gone = Counter(victim.claim.file for victim in victims if victim.claim.file is not None)
        needed = self.need(account, unit, device, gone)
        if needed == 0 and unit.hold:
            return 0  # it begins again within what is held for it, however much others have taken
        back = sum(gain(victim) for victim in victims)
        back += sum(self._file_bytes[file] for file, count in gone.items() if account.files[file] <= count)
        if hopeful:
            back += min(
                self._unexplained.get(self.pool(device), 0), account.vague + sum(vague(victim) for victim in victims)
            )
        return needed - account.bytes - back

    def fits_now(self, unit: UnitView, device: str) -> bool:
        """A fresh sample says that there is room for it, and none of it is promised to anybody."""
        pool = self.pool(device)
        if not self.fresh(device):
            return False
        return self.short(self.now[pool], unit, device) <= 0 and self.short(self.later[pool], unit, device) <= 0

    # --- changes ------------------------------------------------------------------------------------------------------

    def take(self, unit: UnitView, device: str) -> None:
        """The unit is loaded now."""
        pool = self.pool(device)
        for account in (self.now[pool], self.later[pool]):
            self._take(account, unit, device)

    def reserve(self, unit: UnitView, device: str) -> None:
        """The unit is loaded as soon as there is room."""
        self._take(self.later[self.pool(device)], unit, device)

    def _take(self, account: Account, unit: UnitView, device: str) -> None:
        account.bytes -= self.need(account, unit, device)
        if unit.claim.file is not None:
            account.files[unit.claim.file] += 1

    def release(self, units: Iterable[UnitView]) -> None:
        """The units will have gone later."""
        for unit in units:
            if unit.device is None or unit.device not in self.devices:
                continue
            account, file = self.later[self.pool(unit.device)], unit.claim.file
            account.bytes += gain(unit)
            account.vague += vague(unit)
            if file is not None:
                account.files[file] -= 1
                account.bytes += self._file_bytes[file] if account.files[file] == 0 else 0


def gain(unit: UnitView) -> int:
    """Bytes that surely come back when the unit leaves: what it has, and what it may yet take."""
    return max(unit.hold, unit.attributed)


def vague(unit: UnitView) -> int:
    return 0 if unit.attributed else unit.hold
