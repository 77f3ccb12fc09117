"""A server that somebody else wrote, started and stopped by us: mlx-lm's, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import Any

import pytest

from slimproc.config.upstream import Command
from tests.fakes import looped
from tests.upstream.harness_upstream import UpstreamKeeper
from tests.upstream.test_command_replica import family, gone

pytest.importorskip("mlx_lm", reason="its server is what is tried here")

from tests.mlx_models import mlx_tiny_random


def complete(base_url: str) -> dict[str, Any]:
    body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
    request = urllib.request.Request(  # our own server
        base_url + "/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # as above
        return json.loads(answer.read())


@looped
async def test_mlx_lms_own_server_is_started_asked_and_stopped(tmp_path):
    folder = mlx_tiny_random(tmp_path / "model")
    argv = (
        sys.executable,
        "-m",
        "mlx_lm",
        "server",
        "--model",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        "${PORT}",
    )
    async with UpstreamKeeper(Command(argv=argv), load_timeout=60.0) as keeper:
        keeper.replica.ask_start()
        await asyncio.sleep(0)
        life = await keeper.until_ready(limit=60.0)
        slot = keeper.take()
        answer = await asyncio.to_thread(complete, slot.base_url)
        assert answer["usage"]["completion_tokens"] == 4
        slot.release()
        processes = family(life.pid)
        await keeper.stop()
        await gone(processes)
