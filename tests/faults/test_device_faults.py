"""GPUs that are lost, drivers that do not answer, and memory that others take: with the stand-in driver."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil
import pytest

from tests.serving import ServerProcess, script, wait_until
from tests.standin_nvml import LOST, MISMATCH, UNKNOWN, StandInNvml

pytestmark = pytest.mark.slow

GIB = 1 << 30
SMALL_SERVER = Path(__file__).parents[1] / "upstream" / "small_server.py"


@pytest.fixture
def nvml(tmp_path):
    return StandInNvml(tmp_path / "driver")


@pytest.fixture
def serve(tmp_path, nvml):
    with contextlib.ExitStack() as stack:

        def start(models, **top):
            config = {"log_json": True, "memory": {"margin": "512MiB"} | top.pop("memory", {}), "models": models} | top
            return stack.enter_context(ServerProcess(tmp_path / "server", config, **nvml.environ))

        yield start


def of_size(size, **fields):
    own = {key: fields.pop(key) for key in ("load_time", "token_latency") if key in fields}
    return {"backend": "fake", "fake": {"bytes": size} | own, **fields}


def ask(server, model, prompt="hi", **fields):
    return server.post("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 3} | fields)


def probes_of(server):
    """Their pids."""
    found = set()
    for child in server.children():
        with contextlib.suppress(psutil.Error):
            if "slimproc.residency.probes" in child.cmdline():
                found.add(child.pid)
    return found


def states(server):
    return {one["model"]: one["state"] for one in server.replicas()}


def probe_of(server):
    return next(child for child in server.children() if "slimproc.residency.probes" in " ".join(child.cmdline()))


def held(server, gpu):
    return server.metric("memory_bytes", device=gpu.uuid, kind="held")


def test_models_of_a_lost_gpu_move_to_one_with_room_and_those_of_others_notice_nothing(nvml, serve):
    lost, sound = nvml.add_gpu(total=24 * GIB), nvml.add_gpu(total=24 * GIB)
    models = {"a": of_size(6 * GIB), "b": of_size(6 * GIB, device=sound.uuid, token_latency=0.01)}
    server = serve(models, memory={"max_sample_age": 2.0}).wait_ready()
    first = {one["model"]: one["device"] for one in server.replicas()}
    assert first == {"a": lost.uuid, "b": sound.uuid}, "the first that has room"
    with server.stream("hi", model="b", max_tokens=3000) as stream:
        stream.take(1)
        engine = psutil.Process(server.replica(0)["pid"])
        lost.fail(LOST)
        wait_until(lambda: not engine.is_running(), "an engine on a lost GPU is ended, though nobody asks anything")
        assert ask(server, "a").status == 200
        assert len(stream.take(3)) == 3
    assert {one["model"]: one["device"] for one in server.replicas()} == {"a": sound.uuid, "b": sound.uuid}
    assert server.replica(1)["restarts"] == 0
    assert server.metric("engine_restarts_total", model="a", reason="device_lost") == 1
    assert server.metric("device_fault", device=lost.uuid, kind="lost") == 1
    assert server.metric("device_fault", device=sound.uuid, kind="lost") == 0
    assert server.get("/readyz").json["devices"] == {lost.uuid: "lost"}
    assert "Traceback" not in server.log


def test_a_server_of_a_command_on_a_lost_gpu_is_ended_and_started_on_another(nvml, serve):
    """It would answer errors for ever, and nobody could tell from outside."""
    lost, sound = nvml.add_gpu(total=24 * GIB), nvml.add_gpu(total=24 * GIB)
    memory = {"load_peak": GIB, "inference_peak": GIB}
    command = {"argv": [sys.executable, str(SMALL_SERVER), "${PORT}"]}
    server = serve({"c": {"command": command, "inference_path": "/x", "max_body": "1MiB", "memory": memory}})

    assert server.post("/infer?model=c", {}).status == 501, "what that server says to every POST"
    first = server.replica()
    assert (first["state"], first["device"]) == ("ready", lost.uuid)
    process = psutil.Process(first["pid"])
    lost.fail(LOST)
    wait_until(lambda: not process.is_running(), "it is ended")
    assert server.post("/infer?model=c", {}).status == 501
    assert (server.replica()["state"], server.replica()["device"]) == ("ready", sound.uuid)


@pytest.mark.parametrize("named", [False, True], ids=["any GPU", "a GPU by name"])
@pytest.mark.parametrize(
    ("code", "word", "kind"), [(MISMATCH, "reboot", "driver_mismatch"), (UNKNOWN, "Unknown", "unknown")]
)
def test_a_driver_that_is_broken_from_the_start_is_told_of_wherever_somebody_looks(
    nvml, serve, code, word, kind, named
):
    gpu = nvml.add_gpu(total=24 * GIB)
    nvml.fail_init(code)
    memory = {"max_sample_age": 2.0} | ({"devices": [gpu.uuid]} if named else {})
    models = {"a": of_size(6 * GIB)} | ({} if named else {"b": {"backend": "fake", "device": "host"}})
    server = serve(models, preload=[], memory=memory)
    wait_until(lambda: "driver" in server.get("/readyz").json, "the driver is known to be broken")

    ready = server.get("/readyz")
    assert ready.status == 503
    assert ready.json["status"] == "failed"
    assert word in ready.json["driver"]
    assert word in ready.json["models"]["a"]["reason"]
    refused = ask(server, "a")
    assert (refused.status, refused.error["code"]) == (503, "service_unavailable")
    assert word in refused.error["message"]
    assert server.metric("device_fault", device="driver", kind=kind) == 1
    assert word in server.log
    if not named:
        assert ask(server, "b").status == 200, "what needs no GPU is served"

    nvml.fail_init(0)
    probe_of(server).kill()  # another looks at once; by itself it looks again in a minute
    wait_until(lambda: server.get("/readyz").status == 200, "the driver answers")
    assert ask(server, "a").status == 200
    assert states(server)["a"] == "ready"
    assert server.metric("device_fault", device="driver", kind=kind) == 0
    assert "Traceback" not in server.log


def test_where_no_model_wants_a_gpu_a_broken_driver_is_told_of_and_nothing_more(nvml, serve):
    nvml.add_gpu(total=24 * GIB)
    nvml.fail_init(MISMATCH)
    server = serve({"a": {"backend": "fake", "device": "host"}}).wait_ready()
    wait_until(lambda: "reboot" in server.get("/readyz").json.get("driver", ""), "it is told of")
    assert server.get("/readyz").status == 200
    assert ask(server, "a").status == 200


def test_a_driver_that_hangs_has_its_probe_replaced_and_costs_no_model_that_is_in_memory_a_token(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    models = {"a": of_size(6 * GIB, token_latency=0.01), "b": of_size(6 * GIB)}
    server = serve(models, preload=["a"], memory={"max_sample_age": 1.0}).wait_ready()
    probes = lambda: probes_of(server)  # noqa: E731
    before = wait_until(probes, "the probe runs")
    with server.stream("hi", model="a", max_tokens=3000) as stream:
        stream.take(1)
        gpu.hang(60)
        wait_until(lambda: not server.get("/v1/models").json["gpu"]["fresh"], "it is shown that nothing is known")
        wait_until(lambda: probes() and not probes() & before, "the silent probe was killed, and there is another")
        assert ask(server, "b").status == 503
        assert states(server)["b"] == "stopped"
        assert len(stream.take(3)) == 3
    gpu.hang(0)
    wait_until(lambda: ask(server, "b").status == 200, "it is loaded once the driver answers again")
    assert server.replica(0)["restarts"] == 0
    assert "Traceback" not in server.log


def test_a_driver_that_no_longer_matches_stops_no_model_and_lets_none_in_until_it_does_again(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    models = {"a": of_size(6 * GIB), "b": of_size(6 * GIB)}
    server = serve(models, preload=["a"], memory={"max_sample_age": 1.0}).wait_ready()
    gpu.fail(MISMATCH)
    wait_until(
        lambda: not server.get("/v1/models").json["gpu"]["fresh"] or server.get("/readyz").status == 503, "shown"
    )

    refused = ask(server, "b")
    assert refused.status == 503
    assert states(server)["b"] == "stopped"
    assert ask(server, "a").status == 200

    gpu.fail(0)
    wait_until(lambda: ask(server, "b").status == 200, "it is loaded once the driver answers again")
    assert "Traceback" not in server.log


def test_memory_taken_by_others_between_the_claim_and_the_load_costs_one_more_try_and_is_told_in_numbers(nvml, serve):
    """The load begins with 24 GiB free, and somebody takes 20 of them before it has got its 16."""
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": of_size(16 * GIB, load_time=2.0)}, preload=[])
    waiting = server.begin("hi", model="a", max_tokens=3)
    wait_until(lambda: states(server)["a"] == "starting" and gpu.allocated(), "it loads")
    gpu.other(20 * GIB)

    answer = waiting.answer()

    assert (answer.status, answer.error["code"]) == (503, "insufficient_memory")
    plan = answer.json["plan"]
    assert (plan["verdict"], plan["device"], plan["needed"], plan["total"]) == ("refuse", gpu.uuid, 16 * GIB, 24 * GIB)
    assert plan["available"] < 4 * GIB
    assert 1 <= len(server.records("an engine is lost", kind="load_failed")) <= 2
    wait_until(lambda: states(server)["a"] == "stopped", "nobody tries on")
    wait_until(lambda: held(server, gpu) == 0, "nothing is held for it")
    gpu.other(0)
    wait_until(lambda: ask(server, "a").status == 200, "with the memory back, the next request is served")


def test_a_load_that_fails_by_numbers_that_hide_the_truth_is_tried_twice_and_not_for_ever(nvml, serve):
    """The sample always says that it fits: what others take is seen by the loading process alone."""
    gpu = nvml.add_gpu(total=24 * GIB)
    server = serve({"a": of_size(16 * GIB, memory={"load_peak": 4 * GIB, "inference_peak": 4 * GIB})}, preload=[])
    gpu.other(12 * GIB)
    wait_until(lambda: server.metric("memory_bytes", device=gpu.uuid, kind="free") < 13 * GIB, "the sample shows it")

    answer = ask(server, "a")

    assert (answer.status, answer.error["code"]) == (503, "insufficient_memory")
    assert "out of memory" in answer.error["message"]
    assert answer.json["plan"]["needed"] == 4 * GIB
    assert len(server.records("an engine is lost", kind="load_failed")) == 2
    wait_until(lambda: states(server)["a"] == "stopped", "nobody tries on")
    wait_until(lambda: held(server, gpu) == 0, "nothing is held for it")


def test_a_hundred_swaps_lose_no_request_and_the_ledger_drifts_by_no_byte(nvml, serve):
    gpu = nvml.add_gpu(total=24 * GIB)
    gpu.linger(0.05)
    server = serve({name: of_size(16 * GIB) for name in "ab"}).wait_ready()
    before = held(server, gpu)
    for turn in range(100):
        model = "ba"[turn % 2]
        answer = ask(server, model, script(tokens=["x"]))
        assert (answer.status, answer.text) == (200, "x")
        assert list(gpu.allocated().values()) == [16 * GIB], "never both"
    assert server.metric("evictions_total", model="a") + server.metric("evictions_total", model="b") == 100
    wait_until(lambda: held(server, gpu) == before, "as much is held as in the beginning")
    for model in "ab":
        server.admin(f"/admin/models/{model}/unload?wait=true", "POST")
    wait_until(lambda: held(server, gpu) == 0, "and nothing when nothing is loaded")
    assert gpu.allocated() == {}
