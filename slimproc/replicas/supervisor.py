"""Supervisor: all replicas of all models, their owner tasks, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from slimproc.replicas.limits import ReplicaStatistics
from slimproc.replicas.replica import Replica


class Supervisor:
    """Replicas by model, in the configuration's order. ``run`` is the parent of every owner task."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas: dict[str, list[Replica]] = {}
        for replica in replicas:
            self._replicas.setdefault(replica.model, []).append(replica)

    async def run(self) -> None:
        """Own the replicas until cancelled; an owner's bug ends the server rather than leave a replica without one."""
        async with asyncio.TaskGroup() as owners:
            for replica in self:
                owners.create_task(replica.run(), name=f"owner of {replica.name}")
                owners.create_task(replica.watch(), name=f"watcher of {replica.name}")

    def __iter__(self) -> Iterator[Replica]:
        for replicas in self._replicas.values():
            yield from replicas

    def of(self, model: str) -> list[Replica]:
        """The replicas of a configured model."""
        return self._replicas[model]

    def start_all(self) -> None:
        for replica in self:
            replica.ask_start()

    async def stop_all(self, drain_limit: float, exit_limit: float) -> None:
        """Drain for at most ``drain_limit`` seconds, then let the engines exit within ``exit_limit`` before they are
        killed; returns when every process is gone. Servers that live without us are left as they are.
        """
        for replica in self:
            replica.ask_stop(drain_limit, exit_limit, leave=True)
        await asyncio.sleep(0)  # one that was asked to start in this very turn leaves STOPPED before it is waited for
        for replica in self:
            await replica.wait_stopped()

    def statistics(self) -> list[ReplicaStatistics]:
        return [replica.statistics() for replica in self]

    def count_states(self) -> Mapping[tuple[str, str], int]:
        """How many replicas of each model are in each state, for the gauge."""
        counts: dict[tuple[str, str], int] = {}
        for replica in self:
            key = (replica.model, replica.state.value)
            counts[key] = counts.get(key, 0) + 1
        return counts
