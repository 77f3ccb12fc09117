"""The server put together: builds every object, runs them under one parent, and takes them down in order."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import uvloop

from slimproc import __version__, logs
from slimproc.admission.controller import AdmissionController
from slimproc.chat.book import TemplateBook
from slimproc.chat.templates import Renderer
from slimproc.config import Config
from slimproc.errors import ConfigError
from slimproc.fleet import Fleet, credit_of
from slimproc.ipc.region import create_region
from slimproc.lag import LagMeter
from slimproc.listeners import BACKLOG, Listeners
from slimproc.metrics import Metrics
from slimproc.reloader import Parts, Reloader, model_limits, template_overrides
from slimproc.replicas.environment import engine_environment
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState
from slimproc.replicas.supervisor import Supervisor
from slimproc.residency.service import ResidencyService
from slimproc.systemd import ServiceManager, take_sockets

if TYPE_CHECKING:
    from slimproc.http.service import HttpService

log = logs.get("slimproc.server")

EXIT_LIMIT: Final = 1.5
"""Seconds that engines have to exit by themselves in a shutdown, when their requests have had theirs."""
_ECHO: Final = 0.05
"""Seconds. Of a signal that comes right after another, uvloop may tell twice: once by its handler, once by its pipe."""


def run(config: Config, environ: Mapping[str, str] | None = None, *, read: Callable[[], Config] | None = None) -> int:
    """Serve until told to stop; the process's exit status. What cannot be opened (a port in use) is one line and 1.

    ``read``: makes the configuration anew at SIGHUP, or raises ConfigError. None: it stays as it is.

    Raises ConfigError.
    """
    logs.configure(config.log_level, json=config.log_json)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would reap our engines unseen
    try:
        _try_ring(config)
        listeners = Listeners(config, take_sockets(os.environ))
    except OSError as error:
        sys.stderr.write(f"slimproc: {error.strerror or error}\n")
        return 1
    with listeners, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = Server(config, listeners, os.environ if environ is None else environ, read or (lambda: config))
        try:
            return runner.run(server.serve())
        except BaseExceptionGroup as group:
            raise _config_error(group) or group from None


def _config_error(group: BaseException) -> ConfigError | None:
    """The setting that turned out wrong once the machine had been looked at, if that is what ended the server."""
    if isinstance(group, BaseExceptionGroup):
        return next(filter(None, map(_config_error, group.exceptions)), None)
    return group if isinstance(group, ConfigError) else None


def _try_ring(config: Config) -> None:
    """Raise OSError now where no engine could ever be given its ring; a later shortage fails one load only."""
    os.close(create_region(config.ring_size, epoch=0, replica=0, credit=credit_of(config)))


class Server:
    """One running server. ``serve`` is its whole life."""

    def __init__(
        self, config: Config, listeners: Listeners, environ: Mapping[str, str], read: Callable[[], Config]
    ) -> None:
        self._config = config
        self._read = read
        self._listeners = listeners
        self._metrics = Metrics(config.models)
        self._renderer = Renderer()
        self._overrides = template_overrides(config)
        self._templates = TemplateBook(self._renderer, self._overrides)
        self._fleet = Fleet(config, self._metrics, environ, on_change=self._on_replica_change)
        self._supervisor = Supervisor(
            replica for model in config.models.values() for replica in self._fleet.replicas(model)
        )
        self._admission = AdmissionController(
            self._supervisor,
            self._metrics,
            self._templates.render,
            models=model_limits(config),
            max_queue_total=config.max_queue_total,
            refuse_while_loading=config.while_loading == "refuse",
            strict=config.order == "strict",
        )
        self._residency = ResidencyService(
            config,
            self._supervisor,
            environ,
            engine_environment(environ, "probe"),
            demands=self._admission.demands,
            fail_waiting=self._admission.fail_waiting,
            on_eviction=self._count_eviction,
        )
        self._admission.on_demand = self._residency.manager.wake
        self._manager = ServiceManager(environ)
        self._signalled = asyncio.Event()
        self._reload_asked = asyncio.Event()
        self._refused = ""
        self._hangup_at = -math.inf
        self._watches_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
        self._register_gauges()

    def _on_replica_change(self, replica: Replica) -> None:
        self._residency.manager.on_replica_change(replica)
        self._admission.on_replica_change(replica)
        if not self._signalled.is_set():
            self._manager.status(self._status())

    def _status(self) -> str:
        counts = self._supervisor.count_states()
        ready = sum(count for (_, state), count in counts.items() if state == ReplicaState.READY.value)
        status = f"serving at {self._listeners.url}, {ready} of {sum(counts.values())} replicas ready"
        return status + (f"; the last reload was refused: {self._refused}" if self._refused else "")

    def _count_eviction(self, model: str) -> None:
        self._metrics.model(model).evictions += 1

    def _register_gauges(self) -> None:
        self._metrics.gauge("memory_bytes", self._residency.statistics)
        self._metrics.of_the_server["profile_write_failures_total"] = self._residency.profile_write_failures
        self._metrics.gauge("device_fault", self._residency.faults)
        self._metrics.gauge("queue_depth", self._admission.queue_depths)
        self._metrics.gauge("inflight_requests", self._admission.in_flight)
        self._metrics.gauge("replicas", self._supervisor.count_states)
        self._metrics.gauge("stuck_processes", self._supervisor.count_stuck)

    # --- life -----------------------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """Start everything, serve until a signal, stop everything in order; a second signal stops it at once."""
        self._catch_signals()
        async with asyncio.TaskGroup() as parent:
            owners = parent.create_task(self._supervisor.run(), name="supervisor")
            lag = parent.create_task(LagMeter(self._metrics.event_loop_lag).run(), name="lag")
            watchdog = parent.create_task(self._manager.ping(), name="watchdog")
            self._residency.start()
            residency = parent.create_task(self._residency.run(), name="residency")
            rendering = parent.create_task(self._renderer.start(), name="renderers")
            http = await self._open_http()
            self._manager.ready(self._status())
            reloader = self._reloader(http, parent)
            reloads = parent.create_task(self._reload_when_asked(reloader), name="reloads")
            await self._signalled.wait()
            reloads.cancel()
            reloader.close()
            self._manager.stopping("waiting for running requests to end")
            await self._shut_down(http, reloader.config.shutdown_timeout)
            for task in (rendering, lag, watchdog, residency, owners):
                task.cancel()
        log.info("stopped")
        return 0

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one that came during the start is heard now

    def _on_hangup(self) -> None:
        self._hangup_at = time.monotonic()
        if self._watches_terminal and not _has_terminal():
            if not self._signalled.is_set():
                self._on_signal(signal.SIGHUP)  # nobody could stop it any more where it was started
        elif not self._signalled.is_set():
            self._reload_asked.set()

    def _reloader(self, http: HttpService, tasks: asyncio.TaskGroup) -> Reloader:
        parts = Parts(
            self._fleet, self._supervisor, self._admission, self._residency, self._metrics, self._templates, http
        )
        return Reloader(self._config, self._overrides, self._read, parts, tasks)

    async def _reload_when_asked(self, reloader: Reloader) -> None:
        """One after the other: all signals that come during one are answered by the next."""
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            self._manager.reloading()
            self._refused = await reloader.reload()
            self._manager.ready(self._status())

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled.is_set():
            if time.monotonic() - self._hangup_at < _ECHO:
                return
            log.warning("a second signal: stopping at once", signal=signal.Signals(number).name)
            for replica in self._supervisor:
                if replica.life is not None:
                    replica.life.kill()
            self._listeners.remove()
            os._exit(128 + number)
        log.info("stopping", signal=signal.Signals(number).name)
        self._signalled.set()

    async def _open_http(self) -> HttpService:
        # In a thread, and only now: the engines are spawned and load their models while aiohttp is being imported.
        module = await asyncio.to_thread(importlib.import_module, "slimproc.http.service")
        http: HttpService = module.HttpService(
            self._config, self._supervisor, self._admission, self._metrics, self._residency
        )
        await http.open(self._listeners.public, self._listeners.admin, backlog=BACKLOG)
        log.info("serving", version=__version__, url=self._listeners.url, admin=str(self._listeners.admin_path))
        return http

    async def _shut_down(self, http: HttpService, patience: float) -> None:
        """Nothing new; what runs has ``shutdown_timeout``; then the error in its stream, and the engines' end."""
        await http.stop_accepting()
        self._residency.manager.close()
        self._admission.close()
        if not await self._admission.wait_idle(0):
            log.info("waiting for running requests; a second signal ends them", at_most_s=patience)
            await self._admission.wait_idle(patience)
        self._admission.abort()
        await http.close_public()
        await self._supervisor.stop_all(0.0, EXIT_LIMIT)
        await self._fleet.close()
        await self._renderer.close()
        await http.close_admin()


def _has_terminal() -> bool:
    """Whether the terminal that this process was started from, if any, is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
