"""Unloading a remote server within its limit: done when it says ``unloaded``, and by nothing else."""

from __future__ import annotations

import asyncio
import time

from slimproc.upstream.contract import ControlError, ControlRefused, NoAnswer
from slimproc.upstream.remote_server import RemoteServer


class UnloadRefused(Exception):
    """It was not unloaded, as far as is known. ``str()`` is for people."""


async def unload(server: RemoteServer) -> None:
    """Ask, and ask again while it is busy; where the answer is lost or comes early, look. Raises UnloadRefused."""
    limit = server.limits.unload_timeout
    deadline = time.monotonic() + limit
    asked = False
    said, silence = "", "it did not answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            if asked:
                status = await server.read(left)
            else:
                asked = True
                status = await server.control.unload(left)
                server.note_answer(status)
        except NoAnswer as error:
            silence = error.reason  # of the last attempt our own limit may be the reason: what it said before counts
        except ControlRefused as error:
            if error.code != "BUSY":
                raise UnloadRefused(f"it refused to unload: {error.reason}") from None
            asked, said = False, error.reason
        except ControlError as error:
            raise UnloadRefused(error.reason) from None
        else:
            if status.unloaded:
                return
            if status.state != "unloading":
                raise UnloadRefused(f"it answered an unload with {status.state}")
            said = "it is still unloading"
        await asyncio.sleep(min(server.pace.loading, max(0.0, deadline - time.monotonic())))
    raise UnloadRefused(f"it was not unloaded within {limit:g} s: {said or silence}")
