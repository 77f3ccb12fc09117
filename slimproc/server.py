"""The server put together: builds every object, runs them under one parent, and takes them down in order."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import uvloop

from slimproc import __version__, logs
from slimproc.admission.controller import AdmissionController, ModelLimits
from slimproc.chat.book import TemplateBook
from slimproc.chat.templates import Renderer
from slimproc.config import Config
from slimproc.errors import ConfigError
from slimproc.ipc.credit import default_credit
from slimproc.ipc.region import create_region
from slimproc.lag import LagMeter
from slimproc.listeners import BACKLOG, Listeners
from slimproc.metrics import Metrics
from slimproc.replicas.limits import EngineLimits, ReplicaLimits
from slimproc.replicas.replica import Replica
from slimproc.replicas.supervisor import Supervisor

if TYPE_CHECKING:
    from slimproc.http.service import HttpService

log = logs.get("slimproc.server")

EXIT_LIMIT: Final = 1.5
"""Seconds that engines have to exit by themselves in a shutdown, when their requests have had theirs."""


def run(config: Config, environ: Mapping[str, str] | None = None) -> int:
    """Serve until told to stop; the process's exit status. What cannot be opened (a port in use) is one line and 1."""
    logs.configure(config.log_level, json=config.log_json)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would reap our engines unseen
    try:
        _try_ring(config)
        listeners = Listeners(config)
    except (OSError, ConfigError) as error:
        sys.stderr.write(f"slimproc: {error.strerror or error if isinstance(error, OSError) else error.message}\n")
        return 1
    with listeners, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Server(config, listeners, os.environ if environ is None else environ).serve())


def _try_ring(config: Config) -> None:
    """Raise OSError now where no engine could ever be given its ring; a later shortage fails one load only."""
    os.close(create_region(config.ring_size, epoch=0, replica=0, credit=_credit(config)))


def _credit(config: Config) -> str:
    return default_credit() if config.credit == "auto" else config.credit


class Server:
    """One running server. ``serve`` is its whole life."""

    def __init__(self, config: Config, listeners: Listeners, environ: Mapping[str, str]) -> None:
        self._config = config
        self._listeners = listeners
        self._metrics = Metrics(config.models)
        self._renderer = Renderer()
        templates = TemplateBook(self._renderer, _template_overrides(config))
        self._supervisor = Supervisor(self._make_replicas(environ))
        self._admission = AdmissionController(
            self._supervisor,
            self._metrics,
            templates.render,
            models={name: ModelLimits(model.max_queue) for name, model in config.models.items()},
            max_queue_total=config.max_queue_total,
            refuse_while_loading=config.while_loading == "refuse",
        )
        self._signalled = asyncio.Event()
        self._register_gauges()

    def _make_replicas(self, environ: Mapping[str, str]) -> list[Replica]:
        config = self._config
        engine = EngineLimits(
            ring_size=config.ring_size,
            credit=_credit(config),
            stall_timeout=config.stall_timeout,
            cancel_grace=config.cancel_grace,
            environ=environ,
        )
        return [
            Replica(
                index,
                model.engine_settings(),
                ReplicaLimits(model.load_timeout, model.unload_timeout, engine),
                self._metrics.model(name),
                on_change=self._on_replica_change,
            )
            for name, model in config.models.items()
            for index in range(model.replicas)
        ]

    def _on_replica_change(self, replica: Replica) -> None:
        self._admission.on_replica_change(replica)

    def _register_gauges(self) -> None:
        self._metrics.gauge("queue_depth", self._admission.queue_depths)
        self._metrics.gauge("inflight_requests", self._admission.in_flight)
        self._metrics.gauge("replicas", self._supervisor.count_states)

    # --- life -----------------------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """Start everything, serve until a signal, stop everything in order; a second signal stops it at once."""
        self._catch_signals()
        async with asyncio.TaskGroup() as parent:
            owners = parent.create_task(self._supervisor.run(), name="supervisor")
            lag = parent.create_task(LagMeter(self._metrics.event_loop_lag).run(), name="lag")
            self._supervisor.start_all()
            rendering = parent.create_task(self._renderer.start(), name="renderers")
            http = await self._open_http()
            await self._signalled.wait()
            await self._shut_down(http)
            for task in (rendering, lag, owners):
                task.cancel()
        log.info("stopped")
        return 0

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled.is_set():
            log.warning("a second signal: stopping at once", signal=signal.Signals(number).name)
            for replica in self._supervisor:
                if replica.engine is not None:
                    replica.engine.kill()
            self._listeners.admin_path.unlink(missing_ok=True)
            os._exit(128 + number)
        log.info("stopping", signal=signal.Signals(number).name)
        self._signalled.set()

    async def _open_http(self) -> HttpService:
        # In a thread, and only now: the engines are spawned and load their models while aiohttp is being imported.
        module = await asyncio.to_thread(importlib.import_module, "slimproc.http.service")
        http: HttpService = module.HttpService(self._config, self._supervisor, self._admission, self._metrics)
        await http.open(self._listeners.public, self._listeners.admin, backlog=BACKLOG)
        log.info("serving", version=__version__, url=self._listeners.url, admin=str(self._listeners.admin_path))
        return http

    async def _shut_down(self, http: HttpService) -> None:
        """Nothing new; what runs has ``shutdown_timeout``; then the error in its stream, and the engines' end."""
        await http.stop_accepting()
        self._admission.close()
        await self._admission.wait_idle(self._config.shutdown_timeout)
        self._admission.abort()
        await http.close_public()
        await self._supervisor.stop_all(0.0, EXIT_LIMIT)
        await self._renderer.close()
        await http.close_admin()


def _template_overrides(config: Config) -> dict[str, str]:
    return {
        name: model.chat_template.read_text(encoding="utf-8")
        for name, model in config.models.items()
        if model.chat_template is not None
    }
