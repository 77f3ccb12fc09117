"""Serving: ``slimproc serve`` as a child process, its log, its admin socket, and what it looks like from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from slimproc.bench.head import dechunk, parse_head
from slimproc.chaos.failures import ServerFailed
from slimproc.chaos.verdict import Line, Sight

_URL: Final = re.compile(r'"url":"http://([^":/]+):(\d+)"')
_KINDS: Final = {
    "slimproc.engines": "engine",
    "slimproc.chat.renderer": "renderer",
    "slimproc.residency.probes": "probe",
}
_SAMPLE: Final = re.compile(r"slimproc_(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_START_LIMIT: Final = 60.0


class Serving:
    """Start it with ``start``; whatever happens, call ``kill`` at the end."""

    def __init__(self, config: Path, directory: Path) -> None:
        self._directory = directory
        self.admin_socket = directory / "admin.sock"
        self.log_file = directory / "log"
        self.host, self.port = "", 0
        self._seen: dict[int, float] = {}
        """When each process that ever was a descendant began: a number that is used again is another process."""
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "slimproc", "serve", "--config", str(config)),
                    *("--listen", "127.0.0.1:0", "--admin-socket", str(self.admin_socket)),
                    *("--log-json", "--log-level", "info"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"SLIMPROC_STATE_DIR": str(directory / "state")},
                start_new_session=True,  # Ctrl-C is for us, and we stop it
            )
        self._root = psutil.Process(self.process.pid)

    async def start(self) -> None:
        """Until it listens. Raises ServerFailed."""
        end = time.monotonic() + _START_LIMIT
        while time.monotonic() < end:
            if found := _URL.search(self.log_file.read_text(errors="replace")):
                self.host, self.port = found[1], int(found[2])
                return
            if self.process.poll() is not None:
                break
            await asyncio.sleep(0.05)
        raise ServerFailed(f"the server does not listen; its log ends:\n{self.log_tail()}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    # --- its log ----------------------------------------------------------------------------------------------------------

    def log_tail(self, count: int = 20) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-count:])

    def lines(self) -> tuple[list[Line], list[str]]:
        """Its own lines, and what else stands there."""
        ours: list[Line] = []
        junk: list[str] = []
        for text in self.log_file.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                junk.append(text)
                continue
            if isinstance(line, dict) and "message" in line:
                ours.append(line)
            else:
                junk.append(text)
        return ours, junk

    # --- talking to it ------------------------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, *, admin: bool = False, limit: float = 10.0) -> tuple[int, bytes]:
        """Status and body. Raises OSError (which a TimeoutError is), or HeadError when what answers makes no sense."""
        async with asyncio.timeout(limit):
            if admin:
                reader, writer = await asyncio.open_unix_connection(str(self.admin_socket))
            else:
                reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        told = parse_head(head)
        return told.status, (dechunk(body) or b"") if told.chunked else body

    async def admin(self, path: str, method: str = "GET") -> Any:
        _, body = await self.ask(method, path, admin=True)
        return json.loads(body)

    async def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.admin("/admin/replicas"))["replicas"]
        return found

    # --- looking at it ------------------------------------------------------------------------------------------------

    def children(self) -> dict[int, str]:
        """Every living descendant, and what kind of process it is."""
        found: dict[int, str] = {}
        for child in self._root.children(recursive=True) if self.alive else ():
            with contextlib.suppress(psutil.Error):
                words = " ".join(child.cmdline())
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
                self._seen[child.pid] = child.create_time()
                found[child.pid] = next((kind for name, kind in _KINDS.items() if name in words), "other")
        return found

    def survivors(self) -> list[int]:
        """Descendants that outlived it."""
        return [pid for pid, began in self._seen.items() if _lives(pid, began)]

    def resident(self) -> int:
        return int(self._root.memory_info().rss)

    async def metrics(self) -> Sight:
        """Only what it counts, which costs little. Raises as ``ask`` does."""
        _, body = await self.ask("GET", "/metrics")
        return Sight(metrics=dict(_samples(body.decode())))

    async def sight(self) -> Sight:
        """Raises as ``ask`` does."""
        models = (await self.admin("/admin/models"))["models"]
        counted = await self.metrics()
        return Sight(
            descriptors=self._root.num_fds(),
            threads=self._root.num_threads(),
            resident=self.resident(),
            children=self.children(),
            metrics=counted.metrics,
            reserved={model["id"]: model["status"]["reserved_bytes"] for model in models},
            states=[(model["id"], replica["state"]) for model in models for replica in model["replicas"]],
        )

    # --- its end ----------------------------------------------------------------------------------------------------------

    async def stop(self, limit: float) -> int | None:
        """Ask it to stop; its status, or None when it is still there after ``limit`` seconds."""
        self.children()
        self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + limit
        while True:
            status = self.process.poll()
            if status is not None or time.monotonic() >= end:
                return status
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """Whatever is left of it, and of what it started."""
        if self.alive:
            self.children()
            self.process.kill()
        self.process.wait()
        for pid in self.survivors():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _lives(pid: int, began: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _samples(text: str) -> Iterator[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]:
    for line in text.splitlines():
        if found := _SAMPLE.fullmatch(line):
            yield (found[1], tuple(_LABEL.findall(found[2] or ""))), float(found[3])
