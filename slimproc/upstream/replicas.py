"""Upstreams: makes the replicas of models that are not served by engines of ours, and owns the client that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slimproc.config.upstream import Command, Remote
from slimproc.metrics import ModelMetrics
from slimproc.replicas.life import LifeSource
from slimproc.replicas.limits import ReplicaLimits
from slimproc.replicas.replica import Replica
from slimproc.replicas.restart import RestartPolicy
from slimproc.upstream.client import UpstreamClient
from slimproc.upstream.command import CommandLine, CommandSource
from slimproc.upstream.life import Pace
from slimproc.upstream.plain import PlainSource, endless_policy
from slimproc.upstream.ports import Ports
from slimproc.upstream.prepare import Prepare
from slimproc.upstream.remote import RemoteSource
from slimproc.upstream.remote_server import RemoteLimits, RemoteServer


@dataclass(frozen=True)
class UpstreamLimits:
    """``concurrency``: requests at once in each replica. Times in seconds."""

    concurrency: int
    load_timeout: float
    unload_timeout: float
    prepare_timeout: float
    status_timeout: float


class Upstreams:
    """One per server. ``environ`` is our own environment, which commands inherit. ``close`` it last."""

    def __init__(self, environ: Mapping[str, str], *, pace: Pace | None = None) -> None:
        self.client = UpstreamClient()
        self._environ = environ
        self._pace = pace
        self._ports = Ports()
        self._prepares: dict[tuple[str, ...], Prepare] = {}

    def replicas(
        self,
        model: str,
        how: Remote | Command,
        limits: UpstreamLimits,
        metrics: ModelMetrics,
        *,
        on_change: Callable[[Replica], None],
        indices: Sequence[int] | None = None,
    ) -> list[Replica]:
        """One for each base URL; of a command, as many as wanted. ``indices``: their numbers, and so how many; None: from 0 on."""
        if indices is None:
            indices = range(1 if isinstance(how, Command) else len(how.base_urls))
        if isinstance(how, Command):
            sources = [self._command(f"{model}/{index}", how, limits) for index in indices]
        else:
            pairs = zip(indices, how.base_urls, strict=True)
            sources = [self._remote(f"{model}/{index}", how, url, limits) for index, url in pairs]
        return [
            Replica(
                model,
                index,
                source,
                # Who is asked by HTTP keeps its own limit: nobody could kill it at the replica's.
                ReplicaLimits(limits.load_timeout if isinstance(how, Command) else None, limits.unload_timeout),
                metrics,
                on_change=on_change,
                policy=_policy(how),
            )
            for index, source in zip(indices, sources, strict=True)
        ]

    def _command(self, name: str, command: Command, limits: UpstreamLimits) -> LifeSource:
        return CommandSource(
            name,
            self.client,
            CommandLine(command.argv, command.env, self._environ),
            ready_path=command.ready_path,
            concurrency=limits.concurrency,
            status_timeout=limits.status_timeout,
            pace=self._pace,
            given=self._ports,
        )

    def _remote(self, name: str, remote: Remote, base_url: str, limits: UpstreamLimits) -> LifeSource:
        if remote.contract == "none":
            return PlainSource(
                name,
                self.client,
                base_url,
                health_path=remote.health_path,
                concurrency=limits.concurrency,
                status_timeout=limits.status_timeout,
                pace=self._pace,
            )
        server = RemoteServer(
            name,
            self.client,
            base_url,
            RemoteLimits(
                load_timeout=limits.load_timeout,
                unload_timeout=limits.unload_timeout,
                prepare_timeout=limits.prepare_timeout,
                status_timeout=limits.status_timeout,
            ),
            prepare=self._prepare(name, remote.prepare) if remote.prepare else None,
            pace=self._pace,
        )
        return RemoteSource(server, limits.concurrency)

    def _prepare(self, name: str, argv: tuple[str, ...]) -> Prepare:
        """The same command is one: two models, or two servers of one, that name it never run it side by side."""
        if argv not in self._prepares:
            self._prepares[argv] = Prepare(name, argv, self._environ)
        return self._prepares[argv]

    async def close(self) -> None:
        for prepare in self._prepares.values():
            prepare.kill()
        await self.client.close()


def _policy(how: Remote | Command) -> RestartPolicy:
    return endless_policy() if isinstance(how, Remote) and how.contract == "none" else RestartPolicy()
