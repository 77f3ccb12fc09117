"""Templates, messages and waiting, shared by the tests of the renderer."""

import asyncio
import os
import time
from pathlib import Path

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>")
SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
"""Minutes of work; a render of it ends only by being cut off."""


def user(content):
    return [{"role": "user", "content": content}]


async def until(condition, limit=20.0):
    """Wait for ``condition()`` to be true, at most ``limit`` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not come about"
        await asyncio.sleep(0.01)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with Path(f"/proc/{pid}/stat").open() as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
