"""Models on GPUs (the stand-in driver, under the real pynvml): each where it fits, and nothing on the word of old numbers."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.serving import ServerProcess, wait_until
from tests.standin_nvml import StandInNvml

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def nvml(tmp_path):
    return StandInNvml(tmp_path / "driver")


@pytest.fixture
def serve(tmp_path, nvml):
    servers = []

    def start(models, **top):
        config = {"log_json": True, "memory": {"margin": "512MiB"} | top.pop("memory", {}), "models": models} | top
        servers.append(ServerProcess(tmp_path / str(len(servers)), config, **nvml.environ))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def gpu_model(size, **settings):
    own = {key: settings.pop(key) for key in ("load_time", "token_latency") if key in settings}
    return {"backend": "fake", "fake": {"bytes": size} | own, **settings}


def ask(server, model, **fields):
    return server.post("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 3} | fields)


def where(server):
    return {one["model"]: (one["state"], one["device"]) for one in server.replicas()}


def memory(server, gpu, kind):
    return server.metric("memory_bytes", device=gpu.uuid, kind=kind)


def probe_of(server):
    return next(child for child in server.children() if "slimproc.residency.probes" in " ".join(child.cmdline()))


def start_in_vain(directory, nvml, model):
    """The end of a server whose configuration does not suit the machine."""
    file = directory / "slimproc.yaml"
    file.write_text(
        f"listen: 127.0.0.1:0\nstate_dir: {directory}\nadmin_socket: {directory}/admin.sock\nmodels: {{a: {model}}}\n"
    )
    command = [sys.executable, "-m", "slimproc", "serve", "--config", str(file)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, env=os.environ | nvml.environ
    )


def test_a_model_is_loaded_on_the_gpu_and_its_bytes_are_attributed_to_it(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": gpu_model(8 * GIB)}).wait_ready()

    assert where(server) == {"a": ("ready", gpu.uuid)}
    assert gpu.allocated() == {server.replica()["pid"]: 8 * GIB}
    wait_until(lambda: memory(server, gpu, "free") < 17 * GIB, "the sample shows the model")
    assert memory(server, gpu, "available") >= 15 * GIB  # not held twice: 24 - 8 - 0.5
    listed = server.get("/v1/models").json
    assert (listed["gpu"]["total"], listed["gpu"]["fresh"]) == (24 * GIB, True)


def test_two_models_that_fit_together_stay_together_and_a_third_takes_the_place_of_the_least_used(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({name: gpu_model(10 * GIB) for name in "abc"}).wait_ready()
    assert ask(server, "b").status == 200
    assert ask(server, "a").status == 200

    assert ask(server, "c").status == 200

    assert {name: state for name, (state, _) in where(server).items()} == {"a": "ready", "b": "stopped", "c": "ready"}
    assert sum(gpu.allocated().values()) == 20 * GIB


def test_of_two_gpus_the_one_with_room_is_used_and_the_engine_sees_only_that(nvml, serve):
    first, second = nvml.add_gpu(total=10 * GIB), nvml.add_gpu(total=24 * GIB)
    server = serve({"big": gpu_model(20 * GIB), "small": gpu_model(6 * GIB)}).wait_ready()

    assert where(server) == {"big": ("ready", second.uuid), "small": ("ready", first.uuid)}
    assert list(second.allocated().values()) == [20 * GIB]
    assert list(first.allocated().values()) == [6 * GIB]


def test_a_model_goes_where_its_device_says(nvml, serve):
    first, second = nvml.add_gpu(total=24 * GIB), nvml.add_gpu(total=24 * GIB)
    wanted = {"a": second.uuid, "b": first.uuid, "c": "host"}
    models = {name: gpu_model(GIB, device=device) for name, device in wanted.items()}
    server = serve(models).wait_ready()

    assert {name: device for name, (_, device) in where(server).items()} == wanted


def test_a_device_that_is_not_there_is_a_start_error_that_lists_what_there_is(nvml, tmp_path):
    gpu = nvml.add_gpu(total=24 * GIB)

    ended = start_in_vain(
        tmp_path, nvml, "{backend: fake, device: GPU-00000000-0000-0000-0000-00000000dead, fake: {bytes: 1GiB}}"
    )

    assert ended.returncode == 78
    assert "models.a.device" in ended.stderr
    assert gpu.uuid in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_configured_peak_that_no_device_can_hold_is_a_start_error(nvml, tmp_path):
    nvml.add_gpu(total=8 * GIB)

    ended = start_in_vain(
        tmp_path, nvml, "{backend: fake, fake: {bytes: 1GiB}, memory: {load_peak: 9GiB, inference_peak: 1GiB}}"
    )

    assert ended.returncode == 78
    assert "models.a.memory.load_peak" in ended.stderr


def test_memory_that_the_driver_gives_back_late_is_waited_for(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": gpu_model(16 * GIB), "b": gpu_model(16 * GIB)}).wait_ready()
    gpu.linger(2.0)

    assert ask(server, "b").status == 200

    assert where(server)["b"] == ("ready", gpu.uuid)
    assert sum(gpu.allocated().values()) == 16 * GIB


def test_memory_of_other_programs_is_honoured(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": gpu_model(16 * GIB)}, preload=[])
    gpu.other(12 * GIB)
    wait_until(lambda: memory(server, gpu, "external") >= 12 * GIB, "the sample shows the others")

    refused = ask(server, "a")
    gpu.other(0)
    wait_until(lambda: memory(server, gpu, "external") == 0, "the others are gone")

    assert (refused.status, refused.error["code"]) == (503, "insufficient_memory")
    assert ask(server, "a").status == 200


@pytest.mark.parametrize("how", ["no bytes", "no processes", "other numbers"])
def test_where_the_driver_does_not_say_whose_bytes_are_whose_that_is_told_once_with_what_helps(nvml, serve, how):
    gpu = nvml.add_gpu(total=24 * GIB)
    {"no bytes": gpu.hide_bytes, "no processes": gpu.hide_processes, "other numbers": lambda: gpu.shift_pids(1 << 23)}[
        how
    ]()
    server = serve({"a": gpu_model(4 * GIB), "b": gpu_model(4 * GIB)}).wait_ready()

    wait_until(lambda: server.records("the driver does not say whose a GPU's bytes are"), "it is told")
    assert ask(server, "a").status == 200
    wait_until(lambda: memory(server, gpu, "free") == 16 * GIB, "both are seen")
    assert memory(server, gpu, "external") == 0, "nobody else is blamed"
    told = server.records("the driver does not say whose a GPU's bytes are")
    assert [one["device"] for one in told] == [gpu.uuid]
    assert "--pid=host" in told[0]["hint"]


def test_a_peak_that_the_host_cannot_hold_is_a_start_error_whatever_the_driver_does(nvml, tmp_path):
    nvml.hang_init(3600)

    ended = start_in_vain(
        tmp_path, nvml, "{backend: fake, device: host, memory: {load_peak: 64TiB, inference_peak: 1GiB}}"
    )

    assert ended.returncode == 78
    assert "models.a.memory.load_peak" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_killed_engine_gives_its_memory_back_and_is_loaded_again(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    gpu.linger(0.5)
    server = serve({"a": gpu_model(20 * GIB)}).wait_ready()

    killed = server.kill_engine()

    wait_until(lambda: server.replica()["restarts"] == 1 and server.replica()["state"] == "ready", "it is back")
    assert server.replica()["pid"] != killed
    assert gpu.allocated() == {server.replica()["pid"]: 20 * GIB}


def test_a_gpu_that_is_lost_takes_no_load_and_the_server_says_so_and_goes_on(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": gpu_model(8 * GIB), "b": gpu_model(8 * GIB)}, preload=["a"]).wait_ready()
    gpu.fail(15)  # NVML_ERROR_GPU_IS_LOST
    wait_until(lambda: server.get("/readyz").status == 503, "it is not ready with a lost device")

    answer = server.post("/infer?model=b", {"messages": [{"role": "user", "content": "hi"}]})

    assert (answer.status, answer.json["code"]) == (503, "NOT_READY")
    assert "lost" in answer.json["error"]
    assert server.get("/health").status == 200
    assert server.get("/metrics").status == 200
    assert "Traceback" not in server.log


def test_a_gpu_that_comes_back_is_used_again_and_until_then_its_model_goes_to_another(nvml, serve):
    first, second = nvml.add_gpu(total=24 * GIB), nvml.add_gpu(total=24 * GIB)
    server = serve({"a": gpu_model(8 * GIB), "b": gpu_model(20 * GIB)}, preload=["a"]).wait_ready()
    lost, other = (first, second) if where(server)["a"][1] == first.uuid else (second, first)
    lost.fail(15)
    wait_until(lambda: server.get("/readyz").status == 503, "it is not ready with a lost device")
    wait_until(lambda: where(server)["a"][0] != "ready", "what ran there is ended")

    assert ask(server, "a").status == 200
    assert where(server)["a"] == ("ready", other.uuid)
    lost.fail(0)
    probe_of(server).kill()  # only another process sees that a lost GPU is well; the probe looks for itself in a minute
    wait_until(lambda: server.get("/readyz").status == 200, "the device is back")
    assert ask(server, "b").status == 200
    assert where(server)["b"] == ("ready", lost.uuid)
    assert server.metric("evictions_total", model="a") == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_probe_that_is_killed_or_stopped_is_replaced_and_loads_go_on(nvml, serve, number):
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": gpu_model(16 * GIB), "b": gpu_model(16 * GIB)}, preload=["a"]).wait_ready()
    probe = probe_of(server)
    os.kill(probe.pid, number)

    assert ask(server, "b").status == 200  # it waits for a sample of after a's end

    assert sum(gpu.allocated().values()) == 16 * GIB
    wait_until(lambda: not probe.is_running(), "nothing is left of the first probe")
    assert "Traceback" not in server.log


def test_a_driver_that_hangs_stops_no_model_that_is_in_memory_and_lets_no_other_in(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    config = {"a": gpu_model(8 * GIB), "b": gpu_model(8 * GIB)}
    server = serve(config, preload=["a"], memory={"max_sample_age": 1.0}).wait_ready()
    gpu.hang(60)
    wait_until(lambda: not server.get("/v1/models").json["gpu"]["fresh"], "the last sample is too old")

    began = time.monotonic()
    refused = server.post("/infer?model=b", {"messages": [{"role": "user", "content": "hi"}]})

    assert (refused.status, refused.json["code"]) == (503, "NOT_READY")
    assert time.monotonic() - began < 20
    assert ask(server, "a").status == 200
    assert server.stop() == 0


def test_a_mig_instance_is_a_device_of_its_own(nvml, serve):
    gpu = nvml.add_gpu(total=80 * GIB)
    instance = gpu.add_mig(total=20 * GIB)
    server = serve({"a": gpu_model(16 * GIB)}).wait_ready()

    assert where(server) == {"a": ("ready", instance.uuid)}
    assert memory(server, instance, "total") == 20 * GIB


def test_nobody_loads_before_there_is_a_sample_and_without_a_driver_the_host_is_meant(nvml, serve):
    nvml.fail_init(9)  # NVML_ERROR_DRIVER_NOT_LOADED
    server = serve({"a": gpu_model(100 * MIB)}).wait_ready()

    assert where(server) == {"a": ("ready", "host")}
