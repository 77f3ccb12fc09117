"""A front whose models are upstreams that a test plays itself, byte by byte, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from slimproc.admission.controller import AdmissionController, ModelLimits
from slimproc.config import Config, ModelConfig, Remote, RuntimeDirectory
from slimproc.http.app import make_runner, public_app
from slimproc.http.gateway import Gateway
from slimproc.metrics import Metrics
from slimproc.replicas.states import ReplicaState
from slimproc.upstream.slot import UpstreamSlot
from tests.fakes import FakeReplica, FakeSupervisor, eventually
from tests.http.conftest import Answer, RawClient
from tests.http.everything_fits import EverythingFits

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"


class Connection:
    """One connection that the front made to an upstream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.line = b""
        self.headers: dict[str, str] = {}
        self.gone = False

    async def head(self) -> dict[str, str]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        self.line, *lines = raw[:-4].split(b"\r\n")
        pairs = [line.decode("latin-1").split(": ", 1) for line in lines]
        self.headers = {key.lower(): value for key, value in pairs}
        assert len(self.headers) == len(pairs), "no header came twice"
        return self.headers

    async def body(self) -> bytes:
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        assert self.headers.get("transfer-encoding") == "chunked"
        whole = b""
        while size := int(await self.reader.readline(), 16):
            whole += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readline() == b"\r\n"
        return whole

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def wait_gone(self) -> None:
        """Until the front has closed it, whatever it still sends before."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 20):
                pass
        self.gone = True

    def reset(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Connection], Awaitable[None]]


async def answer_ok(connection: Connection) -> None:
    await connection.head()
    await connection.body()
    connection.send(OK)


class PlayedUpstream:
    """A replica that is an upstream. ``behaviour`` is run for every connection; what it saw is in ``connections``."""

    def __init__(self, model: str, index: int, behaviour: Behaviour, slots: int) -> None:
        self.replica = FakeReplica(model, index)
        self.name = self.replica.name
        self.behaviour = behaviour
        self.slots = slots
        self.dead = False
        self.ready_since = time.monotonic()
        self.connections: list[Connection] = []
        self.bodies: list[bytes] = []
        self.unreachable: list[str] = []
        self.taken: set[UpstreamSlot] = set()
        self.base_url = ""
        self._server: asyncio.Server | None = None

    @property
    def occupied(self) -> int:
        return len(self.taken)

    @property
    def free_slots(self) -> int:
        return 0 if self.dead else self.slots - self.occupied

    def take_slot(self) -> UpstreamSlot:
        assert self.free_slots > 0
        slot = UpstreamSlot(self)
        self.taken.add(slot)
        return slot

    def give_back(self, slot: UpstreamSlot) -> None:
        self.taken.remove(slot)
        self.replica.on_change(self.replica)

    def note_unreachable(self, reason: str) -> None:
        self.unreachable.append(reason)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self.connections.append(connection)
        try:
            await self.behaviour(connection)
        except (ConnectionError, asyncio.IncompleteReadError):
            connection.gone = True
        finally:
            writer.close()

    async def close(self) -> None:
        """Nobody listens any more."""
        if self._server is not None:
            self._server.close()
            for connection in self.connections:
                connection.reset()
            self._server = None


class Front:
    """A whole public application over played upstreams. ``models``: by name, what differs from the usual; ``servers``: how
    many of each.
    """

    def __init__(
        self,
        directory: Path,
        models: dict[str, dict[str, Any]] | None = None,
        *,
        behaviour: Behaviour = answer_ok,
        servers: int = 1,
        slots: int = 1,
        ready: bool = True,
        **settings: Any,
    ) -> None:
        wanted = models or {"asr": {}}
        configs = {name: _model(name, **fields) for name, fields in wanted.items()}
        runtime = RuntimeDirectory(directory)
        self.config = Config(models=configs, state_dir=directory, runtime=runtime, **settings)
        self.upstreams = [
            PlayedUpstream(name, index, behaviour, slots)
            for name, model in configs.items()
            if model.upstream is not None
            for index in range(servers)
        ]
        self.replicas = [upstream.replica for upstream in self.upstreams]
        self.replicas += [FakeReplica(name, slots=4) for name, model in configs.items() if model.upstream is None]
        self.metrics = Metrics(configs)
        self._ready = ready

    @property
    def upstream(self) -> PlayedUpstream:
        return self.upstreams[0]

    async def __aenter__(self) -> Self:
        limits = {name: ModelLimits(model.max_queue) for name, model in self.config.models.items()}
        supervisor: Any = FakeSupervisor(self.replicas)
        self.admission = AdmissionController(
            supervisor,
            self.metrics,
            self._render,
            models=limits,
            max_queue_total=self.config.max_queue_total,
            refuse_while_loading=False,
        )
        for replica in self.replicas:
            replica.on_change = self.admission.on_replica_change
        residency = EverythingFits(supervisor, self.config.drain_timeout)
        self.gateway = Gateway(self.config, supervisor, self.admission, self.metrics, residency)
        self._runner = make_runner(public_app(self.gateway), shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self._clients: list[RawClient] = []
        for upstream in self.upstreams:
            await upstream.open()
            if self._ready:
                self.become_ready(upstream)
        for replica in self.replicas:
            if replica not in {upstream.replica for upstream in self.upstreams}:
                replica.become_ready()
        return self

    async def _render(self, *_: Any) -> Any:
        raise NotImplementedError

    def become_ready(self, upstream: PlayedUpstream) -> None:
        upstream.replica.engine = upstream  # type: ignore[assignment]
        upstream.replica.become(ReplicaState.READY)

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()
        await self._runner.cleanup()
        self.gateway.sweeper.close()
        await self.gateway.relay.close()
        for upstream in self.upstreams:
            await upstream.close()

    # --- asking it ----------------------------------------------------------------------------------------------------

    async def connect(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def begin(
        self, body: bytes = b"hello", *, target: str = "/infer?model=asr", headers: str = "", method: str = "POST"
    ) -> RawClient:
        """Send a request and wait for nothing."""
        client = await self.connect()
        length = f"Content-Length: {len(body)}\r\n" if "ontent-" not in headers and "ransfer-" not in headers else ""
        client.send(f"{method} {target} HTTP/1.1\r\nHost: front\r\n{length}{headers}\r\n".encode("latin-1") + body)
        return client

    async def ask(self, body: bytes = b"hello", **options: Any) -> Answer:
        return await (await self.begin(body, **options)).answer()

    async def wait_forwarded(self, count: int = 1) -> Connection:
        """Until ``count`` connections have come to the first upstream; the last."""
        await eventually(lambda: len(self.upstream.connections) >= count, f"{count} requests are forwarded")
        return self.upstream.connections[-1]

    async def wait_free(self) -> None:
        """Until every slot is free and nobody waits."""
        await eventually(lambda: not any(upstream.taken for upstream in self.upstreams), "every slot is free")
        assert not any(self.admission.queue_depths().values())

    def outcomes(self, model: str = "asr") -> dict[str, int]:
        numbers = self.metrics.model(model)
        return {name: count for name, count in (numbers.requests | numbers.rejected).items() if count}


def _model(name: str, **fields: Any) -> ModelConfig:
    if fields.get("backend") is None:
        usual = {
            "remote": Remote(base_urls=("http://127.0.0.1:1",), contract="none"),
            "inference_path": "/v1/audio/transcriptions",
            "max_body": 1 << 20,
            "max_queue": 256,
        }
        fields = usual | fields
    return ModelConfig(name=name, display_name=name, **fields)


def flat_error(answer: Answer) -> tuple[int, str]:
    """Status and code of an error on ``/infer``, whose shape is checked."""
    assert answer.headers["content-type"].startswith("application/json"), answer
    told = json.loads(answer.body)
    assert list(told)[:3] == ["error", "src", "code"]
    assert isinstance(told["error"], str)
    assert told["error"]
    assert told["src"] == "slimproc"
    return answer.status, told["code"]


@contextlib.asynccontextmanager
async def fronted(directory: Path, *arguments: Any, **options: Any) -> AsyncIterator[Front]:
    async with Front(directory, *arguments, **options) as front:
        yield front
