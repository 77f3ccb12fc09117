"""Wishes: models that are wanted in memory though no request waits for them: at the start, or by an operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slimproc import logs
from slimproc.residency.views import Demand, Load, Phase, Plan, UnitView, World

log = logs.get("slimproc.residency")


class Wishes:
    """A wish ends when its model is in memory, or cannot be."""

    def __init__(self) -> None:
        self._wanted: dict[str, Demand] = {}

    def __contains__(self, model: str) -> bool:
        return model in self._wanted

    def preload(self, models: Iterable[str]) -> None:
        """Load these in this order, as far as they fit without evicting anybody."""
        for place, model in enumerate(models):
            self._wanted[model] = Demand(model, since=float(place), waiting=0, preload=True)

    def load(self, model: str, now: float) -> None:
        """As if a request had come."""
        self._wanted[model] = Demand(model, since=now, waiting=0)

    def drop(self, model: str) -> None:
        self._wanted.pop(model, None)

    def beside(self, asked: Sequence[Demand]) -> list[Demand]:
        """The demands of requests, and the wishes for what no request waits for."""
        names = {demand.model for demand in asked}
        return [*asked, *(demand for model, demand in self._wanted.items() if model not in names)]

    def settle(self, plan: Plan, world: World) -> None:
        """Drop what has come true, and what is to be loaded at the start and does not fit."""
        for model, demand in list(self._wanted.items()):
            explanation = plan.explanations.get(model)
            if explanation is None:
                continue
            units = [unit for unit in world.units if unit.model == model]
            phases = {unit.phase for unit in units}
            if not demand.preload:
                if explanation.verdict in ("resident", "refuse"):
                    self.drop(model)
            elif Phase.LOADING in phases:
                continue  # so that whoever asks whether the server is ready is told what it still does
            elif not phases & {Phase.ABSENT, Phase.UNKNOWN}:
                self.drop(model)
            elif not all(unit.asked for unit in world.units):
                continue  # a server that is being asked what it has may turn out to be in nobody's way
            elif _all_fresh(units, world) and not any(load.unit in _names(units) for load in _loads(plan)):
                if explanation.verdict not in ("resident", "loading"):
                    log.warning("a model is not loaded at the start", model=model, reason=explanation.reason)
                self.drop(model)


def _all_fresh(units: Sequence[UnitView], world: World) -> bool:
    devices = {device for unit in units for device in unit.devices}
    return bool(devices) and all(device in world.devices and world.devices[device].fresh for device in devices)


def _names(units: Sequence[UnitView]) -> set[str]:
    return {unit.name for unit in units}


def _loads(plan: Plan) -> list[Load]:
    return [action for action in plan.actions if isinstance(action, Load)]
