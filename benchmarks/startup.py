"""S11: from starting the server to the first token of its model.

python benchmarks/startup.py [--runs 5] [--quick] [--llama-server PATH] [--model PATH]
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_peers
import peers
from command import main
from completions import Ask
from scenario import Comparison, Options, Scenario, interleave

STARTS = 3
"""Of each side in every run: they are short."""
SLOTS = 4
CONTEXT = 2048
TARGET = round(1 / 1.5, 3)
"""slimproc may take 1.5 times as long."""
RETRY = 0.002
"""Seconds between two tries: short beside what is measured, and long enough to leave the server its cores."""
_REQUEST = Ask("Once upon a time", 1).encode()


def against_llama_server(options: Options) -> list[Comparison]:
    executable = llama_peers.find("llama-server", options.llama_server)
    model = llama_peers.model(options)
    found = []
    for threads in (1,) if options.quick else (1, 2):
        starts = {"slimproc": lambda threads=threads: slimproc(model, threads)}
        if executable is not None:
            shape = {"slots": SLOTS, "context": CONTEXT, "threads": threads}
            starts["llama-server"] = lambda shape=shape: llama_peers.LlamaServer(executable, model, **shape)
        if not found and not options.quick:
            for start in starts.values():
                one_start(start)  # files that were not in the page cache are now
        sides = {side: lambda start=start: one_start(start) for side, start in starts.items()}
        seen = interleave(sides, options.runs if options.quick else options.runs * STARTS)
        label = f"exec to the first token, {threads} thread{'s' if threads > 1 else ''}"
        found.append(llama_peers.compare(label, "s", seen, "first_token_s", target=TARGET, lower_is_better=True))
        found[-1].note = _phases(seen)
    found[0].note += f". {llama_peers.note('llama-server', executable)}"
    return found


def slimproc(model: Path, threads: int) -> peers.Server:
    amounts = {"--slots": SLOTS, "--context": CONTEXT, "--threads": threads, "--model": model}
    return peers.Slimproc(*(str(part) for pair in amounts.items() for part in pair), port=peers.free_port())


def one_start(start: Callable[[], peers.Server]) -> dict[str, Any]:
    """Seconds from just before the server is started. RuntimeError: it ended, or gave no token in time."""
    load = os.getloadavg()[0]
    began = time.perf_counter()
    server = start()
    try:
        refusals = 0
        while not (answered := _try(server)):
            refusals += answered is False
            if time.perf_counter() - began > peers.LIMIT:
                raise RuntimeError(f"{server.name} gave no token in {peers.LIMIT:g} s")
            time.sleep(RETRY)
        first = time.perf_counter() - began
        loaded = server.replica()["load_seconds"] if isinstance(server, peers.Slimproc) else None
    finally:
        server.close()
    return {"first_token_s": first, "refusals": refusals, "load_s": loaded, "load_average": load}


def _try(server: peers.Server) -> bool | None:
    """True: the first event has come. False: it is still loading, it says. None: nobody listens yet."""
    server.check()
    try:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=peers.LIMIT)
    except ConnectionRefusedError:
        return None
    with sock:
        sock.sendall(_REQUEST)
        seen = b""
        while b"data: " not in seen:
            got = sock.recv(1 << 16)
            seen += got
            if seen.startswith(b"HTTP/1.1 503"):
                return False
            if not got or not seen.startswith(b"HTTP/1.1 200"[: len(seen)]):
                raise RuntimeError(f"{server.name} answered {seen[:600]!r}")
    return True


def _phases(seen: dict[str, list[dict[str, Any]]]) -> str:
    loads = statistics.median(run["load_s"] for run in seen["slimproc"])
    note = f"slimproc's engine needed {loads:.2f} s of it for its backend's import and load() (median)"
    if "llama-server" in seen:
        note += (
            f"; llama-server answered 503 {statistics.median(run['refusals'] for run in seen['llama-server']):g} times"
        )
    return note


SCENARIOS = [
    Scenario(
        "start",
        "S11",
        "from starting the server to the first token of the demo model, against llama-server",
        f"from exec to the first event of a streaming /v1/completions request for one token. The request is sent as soon "
        f"as the port accepts it: slimproc lets it wait while the model loads, llama-server answers 503 until then, and is "
        f"asked again every {RETRY * 1000:g} ms. {SLOTS} slots of {CONTEXT} tokens on both sides, both as they start by "
        f"default otherwise (llama-server with its warm-up run). Every run is {STARTS} starts of each side, in turns; files "
        "are in the page cache.",
        "a first start from disk, and models whose load takes longer than a server's own start.",
        against_llama_server,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
