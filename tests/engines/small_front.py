"""A front of its own in a process of its own, for tests that kill it: ``python -m tests.engines.small_front MODE``.

Writes the engine's pid as a line as soon as it is in the state that MODE names, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from tests.fakes import eventually
from tests.replicas.harness import Keeper, script


async def main(mode: str) -> None:
    async with Keeper(load_time=5 if mode == "loading" else 0) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.replica.engine, "an engine is spawned")
        assert keeper.replica.engine is not None
        pid = keeper.replica.engine.process.pid
        if mode == "loading":
            await eventually(lambda: keeper.replica.statistics().progress, "it loads")
        elif mode != "spawned":
            engine = await keeper.until_ready()
            if mode == "restart":
                os.kill(pid, signal.SIGKILL)
                pid = (await keeper.until_ready(after=engine)).process.pid
            else:
                options = {"tokens": ["a"], "repeat": 1_000_000, "token_latency": 0.001}
                keeper.generate(script(**options | ({"hang_at": 2} if mode == "hanging" else {})), None)
                await eventually(lambda: keeper.replica.statistics().tokens, "it streams")
        print(pid, flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
