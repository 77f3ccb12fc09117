"""Gateway: what the routes need of the rest of the server, in one place; handlers close over it and hold no globals."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from aiohttp import web

from slimproc.admission.controller import AdmissionController
from slimproc.config import Config, ModelConfig
from slimproc.errors import EngineCrashed, InvalidRequest, ServiceUnavailable, SlimprocError
from slimproc.http.body import read_json_body, say_continue
from slimproc.http.disconnects import DisconnectSweeper
from slimproc.http.forward import Relay
from slimproc.http.generate import Answerer
from slimproc.http.memory import Residency
from slimproc.http.middleware import MODEL, request_id
from slimproc.http.openai.call import Call, VectorCall
from slimproc.http.openai.tokens_schema import DetokenizeCall, TokenizeCall
from slimproc.ipc import wire
from slimproc.metrics import Metrics
from slimproc.replicas.supervisor import Supervisor
from slimproc.request import NEVER, Deadline, EmbedRequest, GenerateRequest

V = TypeVar("V", bound=VectorCall)
Q = TypeVar("Q", TokenizeCall, DetokenizeCall)

QUESTION_LIMIT = 10.0
"""Seconds that an engine has to answer a question between two steps."""


class ReceivedBody(NamedTuple):
    content: bytes
    arrived: float
    """When its request came (monotonic)."""


BODY = web.RequestKey("body", ReceivedBody)
"""Request key: the body, where somebody had to look at it before its handler."""
INFER_MODEL = web.RequestKey("infer model", ModelConfig)
"""Request key: the local model that ``/infer`` was asked for. It is meant whatever the body says, and ``/infer``'s limits
hold.
"""


class Gateway:
    """``started`` is the wall-clock second that the model list gives as ``created``."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        admission: AdmissionController,
        metrics: Metrics,
        residency: Residency,
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.admission = admission
        self.metrics = metrics
        self.residency = residency
        self.sweeper = DisconnectSweeper()
        self.answerer = Answerer(admission, metrics, self.sweeper, keepalive_after=config.keepalive_after)
        self.relay = Relay(admission, self.sweeper)
        self.started = int(time.time())
        self._count_upstreams()

    def reconfigure(self, config: Config) -> None:
        """Another configuration from now on; a request that has been received goes on with the model that it had then."""
        self.config = config
        self.answerer.keepalive_after = config.keepalive_after
        self._count_upstreams()

    def _count_upstreams(self) -> None:
        self.has_upstreams = any(model.upstream is not None for model in self.config.models.values())

    def resolve(self, http: web.Request, name: str | None) -> ModelConfig:
        """The model that a request means by ``name``; its access line will have it. Raises ModelNotFound."""
        model = self.config.resolve_model(name)
        http[MODEL] = model.name
        return model

    async def read_body(self, http: web.Request) -> bytes:
        received: ReceivedBody | None = http.get(BODY)
        if received is not None:
            return received.content
        say_continue(http)
        return await read_json_body(http, limit=self.config.max_json_body, timeout=self.config.body_timeout)

    @overload
    async def receive(self, http: web.Request, parse: Callable[[bytes], Call]) -> tuple[Call, GenerateRequest]: ...
    @overload
    async def receive(self, http: web.Request, parse: Callable[[bytes], V]) -> tuple[V, EmbedRequest]: ...
    async def receive(self, http: web.Request, parse: Callable[[bytes], Call | VectorCall]) -> tuple[Any, Any]:
        """Read and check everything that can be checked without the model; what is refused here is counted here.

        The one deadline counts from now: a slow body is the caller's own time.
        """
        received = http.get(BODY)
        arrived = received.arrived if received is not None else time.monotonic()
        model = http.get(INFER_MODEL)
        try:
            call = parse(await self.read_body(http))
            if model is not None:
                deadline, queue_deadline = self.infer_deadlines(http, model, arrived)
            else:
                model = self.resolve(http, call.model)
                deadline = Deadline.after(self.time_limit(http, model.request_timeout), arrived)
                queue_deadline = NEVER
            work = call.work(request_id=request_id(http), model=model, deadline=deadline, queue_deadline=queue_deadline)
        except SlimprocError as error:
            self.metrics.reject(model.name if model else None, error)
            raise
        return call, work

    async def receive_question(self, http: web.Request, parse: Callable[[bytes], Q]) -> tuple[Q, ModelConfig]:
        """The same for what ``ask`` is to ask, with the model that is meant."""
        try:
            question = parse(await self.read_body(http))
            return question, self.resolve(http, question.model)
        except SlimprocError as error:
            self.metrics.reject(None, error)
            raise

    async def ask(self, model: ModelConfig, make: Callable[[int], wire.Command]) -> wire.Report:
        """Ask any engine of the model that is ready. Raises ServiceUnavailable when there is none, InvalidRequest for what
        the engine refuses, Quarantined and EngineCrashed as a generation would. What is refused here is counted here.
        """
        question, suspects = make(0), self.admission.suspects
        assert isinstance(question, wire.Tokenize | wire.Detokenize)
        refusal: SlimprocError | None = suspects.refusal(model.name, question)
        if refusal is None:
            engines = [replica.serving_engine for replica in self.supervisor.of(model.name)]
            engine = next(filter(None, engines), None)
            refusal = ServiceUnavailable(f"the model {model.name} is not loaded")
            try:
                if engine is not None:
                    async with asyncio.timeout(QUESTION_LIMIT):
                        return await engine.ask(make)
            except TimeoutError:
                refusal = ServiceUnavailable(f"the model {model.name} is too busy to answer")
            except (InvalidRequest, ServiceUnavailable) as error:
                refusal = error
            except EngineCrashed as error:
                if error.inside_of is not None:
                    suspects.note(model.name, question, error.inside_of)
                raise
        self.metrics.reject(model.name, refusal)
        raise refusal

    # --- time ---------------------------------------------------------------------------------------------------------

    def time_limit(self, http: web.Request, own: float) -> float:
        """Seconds: ``own``, which a caller may shorten with ``X-Request-Timeout``. Raises InvalidRequest."""
        given = http.headers.get("X-Request-Timeout")
        if given is None:
            return own
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidRequest("X-Request-Timeout: wanted seconds above 0", param="X-Request-Timeout")
        return min(seconds, own)

    def infer_deadlines(self, http: web.Request, model: ModelConfig, arrived: float) -> tuple[Deadline, Deadline]:
        """The request's, which only the model's own ``request_timeout`` or the caller sets; and that of its wait in the
        queue. Raises InvalidRequest.
        """
        own = model.request_timeout if "request_timeout" in model.origins else math.inf
        deadline = Deadline.after(self.time_limit(http, own), arrived)
        return deadline, Deadline.after(self.config.queue_timeout, arrived)
