"""Gateway: what the routes need of the rest of the server, in one place; handlers close over it and hold no globals."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from aiohttp import web

from slimproc.admission.controller import AdmissionController
from slimproc.config import Config, ModelConfig
from slimproc.errors import InvalidRequest, ServiceUnavailable, SlimprocError
from slimproc.http.body import read_json_body
from slimproc.http.disconnects import DisconnectSweeper
from slimproc.http.generate import Answerer
from slimproc.http.middleware import request_id
from slimproc.http.openai.call import Call, VectorCall
from slimproc.ipc import wire
from slimproc.metrics import Metrics
from slimproc.replicas.supervisor import Supervisor
from slimproc.request import Deadline, EmbedRequest, GenerateRequest

V = TypeVar("V", bound=VectorCall)

QUESTION_LIMIT = 10.0
"""Seconds that an engine has to answer a question between two steps."""


class Gateway:
    """``started`` is the wall-clock second that the model list gives as ``created``."""

    def __init__(
        self, config: Config, supervisor: Supervisor, admission: AdmissionController, metrics: Metrics
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.admission = admission
        self.metrics = metrics
        self.sweeper = DisconnectSweeper()
        self.answerer = Answerer(admission, metrics, self.sweeper, keepalive_after=config.keepalive_after)
        self.started = int(time.time())

    async def read_body(self, http: web.Request) -> bytes:
        return await read_json_body(http, limit=self.config.max_json_body, timeout=self.config.body_timeout)

    @overload
    async def receive(self, http: web.Request, parse: Callable[[bytes], Call]) -> tuple[Call, GenerateRequest]: ...
    @overload
    async def receive(self, http: web.Request, parse: Callable[[bytes], V]) -> tuple[V, EmbedRequest]: ...
    async def receive(self, http: web.Request, parse: Callable[[bytes], Call | VectorCall]) -> tuple[Any, Any]:
        """Read and check everything that can be checked without the model; what is refused here is counted here.

        The one deadline counts from now: a slow body is the caller's own time.
        """
        arrived = time.monotonic()
        model = None
        try:
            call = parse(await self.read_body(http))
            model = self.config.resolve_model(call.model)
            deadline = Deadline.after(_time_limit(http, model), arrived)
            return call, call.work(request_id=request_id(http), model=model, deadline=deadline)
        except SlimprocError as error:
            self.metrics.reject(model.name if model else None, error)
            raise

    async def ask(self, model: ModelConfig, make: Callable[[int], wire.Command]) -> wire.Report:
        """Ask any engine of the model that is ready. Raises ServiceUnavailable when there is none."""
        for replica in self.supervisor.of(model.name):
            if replica.serving is not None:
                try:
                    async with asyncio.timeout(QUESTION_LIMIT):
                        return await replica.serving.ask(make)
                except TimeoutError:
                    raise ServiceUnavailable(f"the model {model.name} is too busy to answer") from None
        raise ServiceUnavailable(f"the model {model.name} is not loaded")


def _time_limit(http: web.Request, model: ModelConfig) -> float:
    """Seconds: the model's limit, which a caller may shorten with ``X-Request-Timeout``. Raises InvalidRequest."""
    given = http.headers.get("X-Request-Timeout")
    if given is None:
        return model.request_timeout
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("X-Request-Timeout: wanted seconds above 0", param="X-Request-Timeout")
    return min(seconds, model.request_timeout)
