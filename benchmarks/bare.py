"""The least that an HTTP framework costs: aiohttp on uvloop with one handler, which reads a request and writes bytes.

    python benchmarks/bare.py [--tokens 16]

The bytes are those of slimproc's own answer of so many tokens of its fake backend, whatever was asked. It prints its
port and serves until it is terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import uvloop
from aiohttp import web
from events import text


def answer(tokens: int) -> bytes:
    """As long as slimproc's, within a few digits."""
    choice = {
        "index": 0,
        "text": "".join(map(text, range(tokens))),
        "logprobs": None,
        "finish_reason": "length",
    }
    usage = {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": tokens + 2}
    head = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1_700_000_000, "model": "fake"}
    return json.dumps({**head, "choices": [choice], "usage": usage}, separators=(",", ":")).encode()


async def serve(tokens: int) -> None:
    body = answer(tokens)

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    uvloop.run(serve(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
