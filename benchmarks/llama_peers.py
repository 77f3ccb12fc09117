"""llama.cpp's own programs, llama-server and llama-batched-bench: finding them, and starting them as slimproc would."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
from scenario import Comparison, Options

from slimproc import model_path
from slimproc.errors import LoadFailed

_ASK = (
    "import json; from slimproc.engines.llama_cpp.library import lib; import llama_cpp; "
    "print(json.dumps([llama_cpp.__version__, lib.llama_print_system_info().decode()]))"
)


def missing(program: str) -> str:
    """What a result says where ``program`` is not there."""
    return (
        f"{program} is not installed, so its side is left out. To get it: build it from the sources in the sdist of "
        f"llama-cpp-python {library()['version']}, as benchmarks/README.md shows, and give --{program} DIRECTORY"
    )


def find(program: str, given: str | None) -> Path | None:
    """The executable: a path, or the folder it is in; by default what PATH has. ``none``: none. SystemExit if absent."""
    if given == "none":
        return None
    if given is None:
        found = shutil.which(program)
        return Path(found) if found else None
    path = Path(given).expanduser().absolute()
    path = path / program if path.is_dir() else path
    if not path.exists():
        raise SystemExit(f"--{program}: there is no {path}")
    return path


@functools.cache
def library() -> dict[str, Any]:
    """slimproc's own llama.cpp: llama-cpp-python's version, and what the library was built with. RuntimeError: none."""
    command = [sys.executable, "-c", _ASK]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=peers.ROOT)
    if asked.returncode:
        raise RuntimeError(f"llama-cpp-python is needed (pip install 'slimproc[llama]'): {asked.stderr[-500:]}")
    version, system = json.loads(asked.stdout)
    return {"version": version, "system_info": system}


def kernel_arguments() -> list[str]:
    """So that both sides compute with the same kernels: slimproc does without repacked weights where there is AMX,
    whose kernels crash when GCC has built them.
    """
    return ["--no-repack"] if "AMX_INT8 = 1" in library()["system_info"] else []


def version(executable: Path) -> str:
    """As it says it: the build's number and commit. RuntimeError when it does not run."""
    asked = subprocess.run([str(executable), "--version"], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise RuntimeError(f"{executable} does not run: {(asked.stderr or asked.stdout)[-500:]}")
    lines = [line for line in (asked.stdout + asked.stderr).splitlines() if line.startswith("version:")]
    return lines[0].removeprefix("version:").strip() if lines else "unknown"


class LlamaServer(peers.Server):
    """llama-server as it comes, but for what slimproc is given too. ``context`` is tokens per slot.

    Its second prompt cache, in host memory, is off: it would copy states away for prompts that never come again.
    """

    readiness = "/health"

    def __init__(self, executable: Path, model: Path, *, slots: int, context: int, threads: int) -> None:
        port = peers.free_port()
        amounts = {"--port": port, "-np": slots, "-c": slots * context, "-t": threads, "--cache-ram": 0}
        command = [str(executable), "-m", str(model), *(str(part) for pair in amounts.items() for part in pair)]
        super().__init__("llama-server", [*command, "--no-webui", *kernel_arguments()], port=port)


def model(options: Options) -> Path:
    """The model's file. RuntimeError when it is not there."""
    try:
        return model_path.resolve(options.model)
    except LoadFailed as error:
        raise RuntimeError(error.message) from error


def servers(
    executable: Path | None, model: Path, *, slots: int, context: int, threads: int
) -> dict[str, Callable[[], peers.Server]]:
    """How each side is started, both alike; llama-server only where it is there."""
    amounts = ("--slots", str(slots), "--context", str(context), "--threads", str(threads))
    starts: dict[str, Callable[[], peers.Server]] = {
        "slimproc": lambda: peers.Slimproc("--model", str(model), *amounts)
    }
    if executable is not None:
        shape = {"slots": slots, "context": context, "threads": threads}
        starts["llama-server"] = lambda: LlamaServer(executable, model, **shape)
    return starts


def compare(
    label: str,
    unit: str,
    seen: dict[str, list[dict[str, Any]]],
    by: str,
    *,
    target: float | None,
    peer: str = "llama-server",
    lower_is_better: bool = False,
) -> Comparison:
    """By the figure ``by`` of each run; ``peer``'s side is empty where it was not measured."""
    values = {"slimproc": [], peer: []} | {side: [run[by] for run in runs] for side, runs in seen.items()}
    runs = [run for turn in zip(*seen.values(), strict=True) for run in turn]
    return Comparison(label, unit, values, target, lower_is_better=lower_is_better, runs=runs)


def note(program: str, executable: Path | None) -> str:
    """Which llama.cpp each side is, and with which kernels; or how to get the one that is missing."""
    ours = f"slimproc computes with llama-cpp-python {library()['version']}"
    if executable is None:
        return f"{missing(program)}. {ours}"
    kernels = " ".join(kernel_arguments())
    why = f"; {kernels}, since slimproc does without repacked weights where there is AMX" if kernels else ""
    return f"{program} {version(executable)}{why}. {ours}"
