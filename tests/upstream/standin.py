"""A model server that is not ours, for tests: the control contract, scripted, and an inference path.

In the test's own loop: ``async with StandIn(load_time=0.1) as server: … server.url … server.loads``. Every attribute of
``Script`` may be changed at any time (``server.script.load_time = 5``). ``close()`` and ``open()`` take the port away
and give it back; ``die()`` also forgets the model, as a process that was restarted does.

As a process of its own (for tests of a whole server): ``with standin_process(load_time=0.1) as url:``; then
``GET /script`` answers ``Script`` and ``Counts`` as JSON and ``POST /script`` changes attributes of ``Script``,
also ``state``.

Inference is any other path. It answers the body as it comes, with what it got in ``X-Method``, ``X-Path``, ``X-Query``
and, as JSON, in ``X-Headers``; its query may say otherwise: ``count=1`` (answer the number of bytes), ``parts=1`` (read a form, and answer name, file name, type, size and SHA-256 of each of
its parts), ``chunks=N`` (answer
``chunk 0\\n`` … instead of the body), ``delay=S`` (seconds before each of these, or before the answer), ``status=N``,
``cut=N`` (break off after N chunks). ``GET /health`` is 200 while ``Script.healthy``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web


@dataclass
class Script:
    """What it does when it is asked; times in seconds."""

    load_time: float = 0.0
    unload_time: float = 0.0
    status_time: float = 0.0
    load_waits: bool = False
    """Answer a load when it is done, and not at once with ``loading``."""
    load_refused: tuple[int, str] | None = None
    """Answer a load with this HTTP status and error code, and do nothing."""
    load_fails: str = ""
    """After ``load_time`` be ``failed``, with this message."""
    unload_refused: tuple[int, str] | None = None
    unload_ignored: bool = False
    """Answer an unload with the state as it is."""
    status_answer: str | None = None
    """The body of every status from now on, whatever is true."""
    status_code: int = 200
    healthy: bool = True
    extra_active: int = 0
    """Requests of others, beside those that are counted."""


@dataclass
class Counts:
    """What it was asked."""

    statuses: int = 0
    loads: int = 0
    unloads: int = 0
    healths: int = 0
    inferences: int = 0
    finished: int = 0
    """Inferences whose answer was sent to its end."""
    broken_off: int = 0
    """Inferences whose client left before that."""


class StandIn:
    """``state`` and ``residency`` may be set; everything else follows from the script."""

    def __init__(self, *, state: str = "unloaded", port: int = 0, **script: Any) -> None:
        self.script = Script(**script)
        self.counts = Counts()
        self.residency: str | None = None
        """Overrides what follows from the state."""
        self.while_loading = "unknown"
        """The residency that it tells while it loads."""
        self.state = state
        self.last_error: dict[str, str] | None = None
        self.active = 0
        self.port = port
        self._runner: web.AppRunner | None = None
        self._work: set[asyncio.Task[None]] = set()

    # --- being there --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def loads(self) -> int:
        return self.counts.loads

    @property
    def unloads(self) -> int:
        return self.counts.unloads

    async def open(self) -> None:
        app = web.Application(client_max_size=1 << 31)
        app.add_routes([
            web.get("/control/status", self._status),
            web.post("/control/load", self._load),
            web.post("/control/unload", self._unload),
            web.get("/script", self._show_script),
            web.post("/script", self._change_script),
            web.get("/health", self._health),
            web.route("*", "/{path:.*}", self._infer),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await self._bind(self._runner)
        self.port = self._runner.addresses[0][1]

    async def _bind(self, runner: web.AppRunner) -> None:
        """A port that was given back may be some client's own for a moment."""
        for attempt in range(200):
            try:
                await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
            except OSError:
                if attempt == 199:
                    raise
                await asyncio.sleep(0.05)  # between two attempts
            else:
                return

    async def close(self) -> None:
        """Nobody answers any more; the model stays as it is."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def die(self) -> None:
        """As a process dies: nobody answers, and the model is out of memory."""
        await self.close()
        for task in self._work:
            task.cancel()
        self.state, self.active = "unloaded", 0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    # --- the control contract -----------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        known = {"unloaded": "not_resident", "ready": "resident", "loading": self.while_loading}
        residency = known.get(self.state, "unknown")
        return {
            "state": self.state,
            "residency": self.residency or residency,
            "active_requests": self.active + self.script.extra_active,
            "last_error": self.last_error,
        }

    async def _status(self, _: web.Request) -> web.Response:
        self.counts.statuses += 1
        if self.script.status_time:
            await asyncio.sleep(self.script.status_time)
        if self.script.status_answer is not None:
            return web.Response(
                status=self.script.status_code, text=self.script.status_answer, content_type="application/json"
            )
        return web.json_response(self.describe(), status=self.script.status_code)

    async def _load(self, request: web.Request) -> web.Response:
        self.counts.loads += 1
        assert await request.json() == {}
        if self.script.load_refused is not None:
            return _refuse(*self.script.load_refused)
        if self.state in ("unloaded", "failed"):
            self.state, self.last_error = "loading", None
            loading = self._begin(self._become_ready())
            if self.script.load_waits:
                await asyncio.wait({loading})
        return web.json_response(self.describe())

    async def _become_ready(self) -> None:
        await asyncio.sleep(self.script.load_time)
        if self.state != "loading":
            return
        if self.script.load_fails:
            self.state, self.last_error = "failed", {"code": "LOAD_FAILED", "message": self.script.load_fails}
        else:
            self.state = "ready"

    async def _unload(self, request: web.Request) -> web.Response:
        self.counts.unloads += 1
        assert await request.json() == {}
        if self.script.unload_refused is not None:
            return _refuse(*self.script.unload_refused)
        if self.active + self.script.extra_active:
            return _refuse(409, "BUSY")
        if not self.script.unload_ignored:
            self.state = "unloading"
            await asyncio.sleep(self.script.unload_time)
            self.state = "unloaded"
        return web.json_response(self.describe())

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def _show_script(self, _: web.Request) -> web.Response:
        return web.json_response({**asdict(self.script), **asdict(self.counts), **self.describe()})

    async def _change_script(self, request: web.Request) -> web.Response:
        for key, value in (await request.json()).items():
            target = self if key in ("state", "residency", "while_loading") else self.script
            assert hasattr(target, key), key
            setattr(target, key, tuple(value) if isinstance(value, list) else value)
        return web.json_response({})

    async def _health(self, _: web.Request) -> web.Response:
        self.counts.healths += 1
        return web.Response(status=200 if self.script.healthy else 503)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        self.counts.inferences += 1
        self.active += 1
        try:
            answer = await self._answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.counts.broken_off += 1
            raise
        else:
            self.counts.finished += 1
            return answer
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        options = request.query
        delay, chunks = float(options.get("delay", 0)), int(options.get("chunks", -1))
        cut = int(options.get("cut", -1))
        answer = web.StreamResponse(status=int(options.get("status", 200)))
        answer.headers["X-Method"], answer.headers["X-Path"] = request.method, request.path
        answer.headers["X-Query"] = request.rel_url.raw_query_string
        answer.headers["X-Headers"] = json.dumps(dict(request.headers))
        answer.content_type = request.content_type
        if chunks < 0 and delay:
            await asyncio.sleep(delay)
        if "parts" in options:
            parts = await _read_parts(request)
            await answer.prepare(request)
            await answer.write(json.dumps(parts).encode())
        elif chunks >= 0 or "count" in options:
            size = 0
            async for piece in request.content.iter_any():
                size += len(piece)
            await answer.prepare(request)
            if "count" in options:
                await answer.write(b"%d" % size)
            for number in range(chunks):
                if number == cut:
                    break
                await asyncio.sleep(delay)
                await answer.write(b"chunk %d\n" % number)
        else:
            await answer.prepare(request)
            async for piece in request.content.iter_any():
                await answer.write(piece)
        if cut >= 0:
            assert request.transport is not None
            request.transport.abort()
        await answer.write_eof()
        return answer


async def _read_parts(request: web.Request) -> list[tuple[str | None, str | None, str | None, int, str]]:
    found = []
    async for part in await request.multipart():
        size, digest = 0, hashlib.sha256()
        while piece := await part.read_chunk(1 << 18):
            size += len(piece)
            digest.update(piece)
        found.append((part.name, part.filename, part.headers.get("Content-Type"), size, digest.hexdigest()))
    return found


def _refuse(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": f"refused as {code}"}}, status=status)


# --- as a process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def standin_process(*, port: int = 0, **script: Any) -> Iterator[str]:
    """A stand-in in a process of its own; its base URL. ``state`` may be given as well as what ``Script`` has."""
    argv = [sys.executable, "-m", "tests.upstream.standin", str(port), json.dumps(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://"), "it says where it listens"
            yield url
        finally:
            process.kill()


async def _serve(port: int, script: dict[str, Any]) -> None:
    async with StandIn(port=port, **script) as server:
        print(server.url, flush=True)  # this is how it says where it is
        await asyncio.to_thread(sys.stdin.read)  # until its parent is gone


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), json.loads(sys.argv[2])))
