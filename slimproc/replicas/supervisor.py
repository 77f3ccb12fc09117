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
        self._retired: list[Replica] = []
        self._owners: asyncio.TaskGroup | None = None
        self._tasks: dict[Replica, list[asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Own the replicas until cancelled; an owner's bug ends the server rather than leave a replica without one."""
        async with asyncio.TaskGroup() as self._owners:
            for replica in self:
                self._own(replica)
            await asyncio.Event().wait()  # for ever: others may come

    def _own(self, replica: Replica) -> None:
        if self._owners is not None:
            self._tasks[replica] = [
                self._owners.create_task(replica.run(), name=f"owner of {replica.name}"),
                self._owners.create_task(replica.watch(), name=f"watcher of {replica.name}"),
            ]

    def __iter__(self) -> Iterator[Replica]:
        """All that there are, also those that have been replaced and have not ended."""
        for replicas in self._replicas.values():
            yield from replicas
        yield from self._retired

    def of(self, model: str) -> list[Replica]:
        """The replicas that serve a model, or are to; none of a model that is not (any more) configured."""
        return self._replicas.get(model, [])

    def indices(self, model: str) -> set[int]:
        """The numbers of all its replicas, also of those that are on their way out: a new one needs another."""
        return {replica.index for replica in self if replica.model == model}

    def replace(self, model: str, replicas: list[Replica]) -> list[Replica]:
        """These serve the model from now on. Returns those that did, which the caller stops and then removes."""
        old = self.of(model)
        self._replicas[model] = replicas
        self._retired += old
        for replica in replicas:
            self._own(replica)
        return old

    def retire(self, model: str) -> list[Replica]:
        """Nothing serves the model from now on. Returns those that did, as ``replace`` does."""
        old = self.replace(model, [])
        del self._replicas[model]
        return old

    def remove(self, replica: Replica) -> None:
        """One that was replaced has stopped."""
        self._retired.remove(replica)
        for task in self._tasks.pop(replica, ()):
            task.cancel()

    async def stop_all(self, drain_limit: float, exit_limit: float) -> None:
        """Drain for at most ``drain_limit`` seconds, then let the engines exit within ``exit_limit`` before they are
        killed; returns when every process is gone, but for those that nothing can end. Servers that live without us are
        left as they are.
        """
        for replica in self:
            replica.ask_stop(drain_limit, exit_limit, leave=True)
        await asyncio.sleep(0)  # one that was asked to start in this very turn leaves STOPPED before it is waited for
        for replica in self:
            await replica.wait_ended()

    def statistics(self) -> list[ReplicaStatistics]:
        return [replica.statistics() for replica in self]

    def count_states(self) -> Mapping[tuple[str, str], int]:
        """How many replicas of each model are in each state, for the gauge."""
        counts: dict[tuple[str, str], int] = {}
        for replica in self:
            key = (replica.model, replica.state.value)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def count_stuck(self) -> Mapping[str, int]:
        """Processes of each model that do not end though they were killed, for the gauge."""
        counts: dict[str, int] = {}
        for replica in self:
            counts[replica.model] = counts.get(replica.model, 0) + bool(replica.stuck)
        return counts
