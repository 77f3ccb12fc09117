"""HttpService: the public and the admin application on their sockets, opened and closed in the server's order.

The server imports this module last: aiohttp takes longer to import than an engine takes to be spawned.
"""

from __future__ import annotations

import socket
from typing import Final

from aiohttp import web

from slimproc.admission.controller import AdmissionController
from slimproc.config import Config
from slimproc.http.app import admin_app, make_runner, public_app
from slimproc.http.gateway import Gateway
from slimproc.http.memory import Residency
from slimproc.metrics import Metrics
from slimproc.replicas.supervisor import Supervisor

CLEANUP_LIMIT: Final = 1.0
"""Seconds that handlers have to write their last event once everything else has ended."""


class HttpService:
    """``open``, then ``stop_accepting``, ``close_public``, and ``close_admin`` last: operators may watch a shutdown."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        admission: AdmissionController,
        metrics: Metrics,
        residency: Residency,
    ) -> None:
        self._gateway = Gateway(config, supervisor, admission, metrics, residency)
        self._public = make_runner(public_app(self._gateway), shutdown_timeout=CLEANUP_LIMIT)
        self._admin = make_runner(admin_app(self._gateway), shutdown_timeout=CLEANUP_LIMIT)

    def reconfigure(self, config: Config) -> None:
        self._gateway.reconfigure(config)

    async def open(self, public: socket.socket, admin: socket.socket, *, backlog: int) -> None:
        """Serve on two sockets that are bound."""
        await self._public.setup()
        await web.SockSite(self._public, public, backlog=backlog).start()
        await self._admin.setup()
        await web.SockSite(self._admin, admin).start()

    async def stop_accepting(self) -> None:
        """No new connections; those that are open are answered."""
        for site in list(self._public.sites):
            await site.stop()

    async def close_public(self) -> None:
        await self._public.cleanup()
        await self._gateway.relay.close()
        self._gateway.sweeper.close()

    async def close_admin(self) -> None:
        await self._admin.cleanup()
