"""Servers that are not ours, behind one memory budget: loaded, drained and unloaded by the control contract, and believed
in nothing that they have not said.
"""

import contextlib
import json
import random
import signal
import socket
import sys
import threading
import urllib.request

import pytest
import yaml

from tests.serving import ServerProcess, wait_until
from tests.standin_nvml import StandInNvml
from tests.upstream.standin import standin_process

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

GIB = 1 << 30


class Remote:
    """A stand-in server in a process of its own."""

    def __init__(self, url):
        self.url = url

    def script(self, **changes):
        data = json.dumps(changes).encode()
        request = urllib.request.Request(f"{self.url}/script", data, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=10).read()

    @property
    def seen(self):
        return json.loads(urllib.request.urlopen(f"{self.url}/script", timeout=10).read())


@pytest.fixture
def remote():
    with contextlib.ExitStack() as stack:
        yield lambda **script: Remote(stack.enter_context(standin_process(**script)))


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(models, **settings):
        environ = settings.pop("environ", {})
        limit = settings.pop("limit", 24 * GIB)
        config = {"log_json": True, "memory": {"margin": 0, "host_limit": limit}, "models": models} | settings
        servers.append(ServerProcess(tmp_path / str(len(servers)), config, **environ))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def model(url, peak=GIB, path="/echo", **settings):
    keys = {"prepare", "contract", "health_path"}
    how = {"base_url": url} | {key: settings.pop(key) for key in keys & settings.keys()}
    profile = {"load_peak": peak, "inference_peak": peak, "max_concurrency": 4}
    managed = how.get("contract") != "none"
    return (
        {"remote": how, "inference_path": path, "max_body": "1MiB"}
        | ({"memory": profile} if managed else {})
        | settings
    )


def infer(server, name, body=b"hello", query=""):
    return server.request("POST", f"/infer?model={name}{query}", body, {"Content-Type": "text/plain"})


def status(server, name):
    return next(one["status"] for one in server.get("/v1/models").json["data"] if one["id"] == name)


def code(answer):
    assert answer.json["src"] == "slimproc"
    return answer.status, answer.json["code"]


def test_a_remote_model_is_loaded_for_a_request_and_gets_its_body_unchanged(remote, serve):
    there = remote(load_time=0.1)
    server = serve({"asr": model(there.url, path="/v1/audio/transcriptions", aliases=["ears"])})

    answer = infer(server, "ears", b"\x00RIFF\xff", query="&language=de&x=%2F+a")

    assert (answer.status, answer.body) == (200, b"\x00RIFF\xff")
    assert answer.headers["X-Path"] == "/v1/audio/transcriptions"
    assert answer.headers["X-Query"] == "language=de&x=%2F+a"
    assert there.seen["loads"] == 1
    assert status(server, "asr")["remote_state"] == "ready"
    assert status(server, "asr")["reserved_bytes"] == GIB


PEAKS = {"qwen-asr": 20 * GIB, "qwen-fa": 5 * GIB, "qwen-vlm": 22 * GIB}
PATHS = {"qwen-asr": "/v1/audio/transcriptions", "qwen-fa": "/align", "qwen-vlm": "/v1/chat/completions"}


@contextlib.contextmanager
def memory_of(there, gpu):
    """While inside, the card's memory is what the servers say that they have on it."""
    over = threading.Event()

    def follow():
        while not over.wait(0.05):
            gpu.other(sum(PEAKS[name] for name, one in there.items() if one.seen["state"] in ("loading", "ready")))

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


def test_three_models_that_do_not_fit_together_take_turns_on_one_gpu(remote, serve, tmp_path):
    """The case that the proxy is for: speech, its alignment and a vision model on a card of 24 GiB."""
    nvml = StandInNvml(tmp_path / "driver")
    gpu = nvml.add_gpu(total=24 * GIB)
    there = {name: remote() for name in PEAKS}
    models = {name: model(one.url, PEAKS[name], PATHS[name], device=gpu.uuid) for name, one in there.items()}
    with memory_of(there, gpu):
        server = serve(models, environ=nvml.environ)

        for name in [*PEAKS, *PEAKS]:
            answer = infer(server, name)
            assert (answer.status, answer.headers["X-Path"]) == (200, PATHS[name])

    assert [one.seen["loads"] for one in there.values()] == [2, 2, 2]
    assert [one.seen["state"] for one in there.values()] == ["unloaded", "unloaded", "ready"]
    assert server.get("/v1/models").json["gpu"]["total"] == 24 * GIB


def test_work_that_others_gave_a_server_is_waited_for_before_it_is_unloaded(remote, serve):
    busy, other = remote(), remote()
    server = serve({"a": model(busy.url, 16 * GIB), "b": model(other.url, 16 * GIB)})
    assert infer(server, "a").status == 200
    busy.script(extra_active=1)
    waiting = server.begin("x", path="/infer?model=b")
    wait_until(lambda: server.replica()["state"] == "draining", "a is drained")
    assert busy.seen["unloads"] == 0

    busy.script(extra_active=0)

    assert waiting.answer().status == 200
    assert busy.seen["unloads"] == 1


def test_a_server_that_is_ready_when_we_start_is_held_and_loaded_no_second_time(remote, serve):
    there = remote(state="ready")
    server = serve({"a": model(there.url)})
    wait_until(lambda: status(server, "a")["state"] == "ready", "it is found ready")

    assert status(server, "a")["reserved_bytes"] == GIB
    assert infer(server, "a").status == 200
    assert there.seen["loads"] == 0


def test_a_shutdown_leaves_a_remote_model_as_it_is(remote, serve):
    there = remote()
    server = serve({"a": model(there.url)})
    assert infer(server, "a").status == 200

    assert server.stop() == 0

    assert (there.seen["state"], there.seen["unloads"]) == ("ready", 0)


def reload(server, models):
    """Put other models in force."""
    before = len(server.records("reloaded"))
    file = server.log_path.parent / "slimproc.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"models": models}))
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(server.records("reloaded")) > before, "it is in force")


def wait_replicas(server, *names):
    wait_until(lambda: [one["model"] for one in server.replicas()] == [*names], f"{names} are all that there are")


def test_a_server_whose_model_gets_another_name_goes_on_under_it_and_is_not_unloaded(remote, serve):
    there = remote()
    server = serve({"old": model(there.url)})
    running = server.begin("x", path="/infer?model=old&delay=2")
    wait_until(lambda: there.seen["inferences"] == 1, "it is asked")

    reload(server, {"new": model(there.url.replace("127.0.0.1", "localhost"))})
    assert infer(server, "new").status == 200
    assert running.answer().status == 200
    wait_replicas(server, "new")

    assert infer(server, "new").status == 200
    assert (there.seen["loads"], there.seen["unloads"]) == (1, 0)
    assert status(server, "new")["reserved_bytes"] == GIB
    wait_until(lambda: server.metric("memory_bytes", device="host", kind="held") == GIB, "it is held once")


def test_a_model_that_was_removed_and_is_back_before_its_last_request_has_ended_is_not_unloaded(remote, serve):
    there, other = remote(), remote()
    models = {"other": model(other.url), "asr": model(there.url)}
    server = serve(models)
    running = server.begin("x", path="/infer?model=asr&delay=2")
    wait_until(lambda: there.seen["inferences"] == 1, "it is asked")

    reload(server, {"other": models["other"]})
    reload(server, models)
    assert running.answer().status == 200
    wait_until(lambda: server.records("a replica is gone"), "the old one is gone")

    assert infer(server, "asr").status == 200
    assert (there.seen["loads"], there.seen["unloads"]) == (1, 0)


def test_a_server_to_which_a_model_returns_before_its_last_request_there_has_ended_is_not_unloaded(remote, serve):
    there, other = remote(), remote()
    server = serve({"asr": model(there.url)}, drain_timeout=300)
    running = server.begin("x", path="/infer?model=asr&delay=600")
    wait_until(lambda: there.seen["inferences"] == 1, "it is asked")

    reload(server, {"asr": model(other.url)})
    assert infer(server, "asr").status == 200
    assert other.seen["inferences"] == 1
    reload(server, {"asr": model(there.url)})
    assert infer(server, "asr").status == 200
    running.reset()
    wait_replicas(server, "asr")

    assert infer(server, "asr").status == 200
    assert (there.seen["loads"], there.seen["unloads"], other.seen["unloads"]) == (1, 0, 1)
    wait_until(lambda: server.metric("memory_bytes", device="host", kind="held") == GIB, "it is held once")


def test_a_replaced_use_of_a_server_ends_with_its_own_work_and_not_with_that_of_its_successor(remote, serve):
    there = remote()
    server = serve({"asr": model(there.url)}, drain_timeout=300)
    first = server.begin("x", path="/infer?model=asr&delay=2")
    wait_until(lambda: there.seen["inferences"] == 1, "the old one has work")

    reload(server, {"asr": model(there.url, 2 * GIB)})
    running = server.begin("x", path="/infer?model=asr&delay=600")
    wait_until(lambda: there.seen["inferences"] == 2, "the new one has work")
    assert first.answer().status == 200
    wait_replicas(server, "asr")

    wait_until(lambda: server.metric("memory_bytes", device="host", kind="held") == 2 * GIB, "it is held once")
    assert there.seen["unloads"] == 0
    running.close()


@pytest.mark.parametrize("says", ["unknown", "resident", "not_resident", "nothing"])
def test_a_load_that_outlives_its_limit_is_told_and_keeps_the_next_model_out(remote, serve, says):
    """Whatever the server says of its memory while it loads, and also if it says nothing any more."""
    slow, other = remote(load_time=60, load_waits=says == "nothing"), remote()
    models = {"a": model(slow.url, 16 * GIB, load_timeout=1.0), "b": model(other.url, 16 * GIB)}
    server = serve(models, status_timeout=0.2)
    if says != "nothing":
        slow.script(while_loading=says)

    failing = server.begin("x", path="/infer?model=a")
    wait_until(lambda: slow.seen["loads"] == 1, "it loads")
    if says == "nothing":
        slow.script(status_time=60)
    failed = failing.answer()
    refused = infer(server, "b")

    assert code(failed) == (502, "LOAD_FAILED")
    assert code(refused) == (503, "RESOURCES")
    assert "a/0" in refused.json["error"]
    assert other.seen["loads"] == 0
    assert status(server, "a")["reserved_bytes"] == 16 * GIB
    slow.script(status_time=0, state="unloaded")
    wait_until(lambda: infer(server, "b").status == 200, "it goes on when the server has let go")


def test_a_load_that_fails_keeps_its_hold_until_the_server_is_unloaded(remote, serve):
    broken, other = remote(load_fails="out of memory"), remote()
    server = serve({"a": model(broken.url, 16 * GIB), "b": model(other.url, 16 * GIB)})

    assert code(infer(server, "a")) == (502, "LOAD_FAILED")
    assert code(infer(server, "b")) == (503, "RESOURCES")
    assert other.seen["loads"] == 0
    assert status(server, "a")["reserved_bytes"] == 16 * GIB
    broken.script(state="unloaded")
    wait_until(lambda: infer(server, "b").status == 200, "it goes on when the server has let go")
    assert broken.seen["loads"] == 1, "nothing is tried again by itself"


def test_an_unload_that_outlives_its_limit_is_told_and_blocks_the_next_load(remote, serve):
    stuck, other = remote(unload_time=60), remote()
    models = {"a": model(stuck.url, 16 * GIB, unload_timeout=0.5), "b": model(other.url, 16 * GIB)}
    server = serve(models)
    assert infer(server, "a").status == 200

    first = infer(server, "b")
    second = infer(server, "b")

    assert code(first) == (502, "UNLOAD_FAILED")
    assert code(second) == (503, "LIFECYCLE_PENDING")
    assert other.seen["loads"] == 0
    stuck.script(unload_time=0, state="unloaded")
    wait_until(lambda: infer(server, "b").status == 200, "it goes on when the server has let go")


def test_a_port_where_nobody_answers_leaves_the_model_unknown_and_blocks_other_loads(remote, serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    other = remote()
    server = serve({"a": model(f"http://127.0.0.1:{port}"), "b": model(other.url)})
    wait_until(lambda: status(server, "a")["state"] == "unknown", "it was asked in vain")

    assert (status(server, "a")["ready"], status(server, "a")["residency"]) == (None, None)
    refused = infer(server, "b")
    assert code(refused) == (503, "RESOURCES")
    assert "a/0" in refused.json["error"]
    assert other.seen["loads"] == 0


def test_a_server_that_has_not_been_asked_yet_costs_a_local_model_neither_its_start_nor_a_request(remote, serve):
    """Its first answer comes after the first look at the memory, and after the first request."""
    slow = remote(status_time=1.0)
    local = {name: {"backend": "fake", "memory": {"load_peak": GIB, "inference_peak": GIB}} for name in ("b", "c")}
    server = serve({"a": model(slow.url)} | local, preload=["b"])

    asked = server.begin("x", model="c", max_tokens=1)
    wait_until(lambda: status(server, "b")["state"] == "ready", "it is loaded for the start")
    assert asked.answer().status == 200
    assert server.records("a model is not loaded at the start") == []


def test_a_remote_model_is_loaded_at_the_start_when_it_is_to_be_and_only_looked_at_when_not(remote, serve):
    wanted, other = remote(), remote()
    server = serve({"a": model(wanted.url), "b": model(other.url)}, preload=["a"])
    wait_until(lambda: status(server, "a")["state"] == "ready", "it is loaded")
    wait_until(lambda: status(server, "b")["remote_state"] == "unloaded", "it was asked")
    assert (wanted.seen["loads"], other.seen["loads"]) == (1, 0)
    assert server.get("/readyz").status == 200


@pytest.mark.parametrize("wanted", [True, False])
def test_at_the_start_a_server_is_prepared_when_its_model_is_to_be_loaded_and_else_not(serve, tmp_path, wanted):
    command = tmp_path / "prepare"
    command.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    command.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    there = model(url, prepare={"argv": [str(command)]}, prepare_timeout=1.0)
    server = serve({"a": there}, preload=["a"] if wanted else [])

    wait_until(lambda: status(server, "a")["remote_state"] == "unknown", "it was asked in vain")
    if wanted:
        wait_until((tmp_path / "ran").exists, "it is prepared")
    assert (tmp_path / "ran").exists() is wanted


def test_a_stranger_on_the_port_is_not_ready(remote, serve):
    stranger = remote(status_answer='{"ok": true}')
    server = serve({"a": model(stranger.url)})

    answer = infer(server, "a")

    assert answer.status in (502, 503)
    assert stranger.seen["inferences"] == 0


def test_a_server_that_is_not_there_is_prepared_once_and_then_loaded(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = tmp_path / "prepare"
    root = __file__.rpartition("/tests/")[0]
    command.write_text(
        f"#!/bin/sh\necho run >> {tmp_path}/runs\npwd > {tmp_path}/where\n"
        f"cd {root} && sleep 60 | {sys.executable} -m tests.upstream.standin {port} '{{}}' > {tmp_path}/out 2>&1 &\n"
    )
    command.chmod(0o755)
    server = serve({"a": model(f"http://127.0.0.1:{port}", prepare={"argv": [str(command)]})})

    answers = [server.begin("x", path="/infer?model=a") for _ in range(3)]

    assert [one.answer().status for one in answers] == [200] * 3
    assert (tmp_path / "runs").read_text() == "run\n"
    assert (tmp_path / "where").read_text().strip() == str(tmp_path)


def test_a_server_without_a_contract_serves_while_it_is_well_and_needs_no_memory_of_ours(remote, serve):
    there = remote()
    server = serve({"a": model(there.url, contract="none")})
    wait_until(lambda: infer(server, "a").status == 200, "it serves")
    assert there.seen["loads"] == 0

    there.script(healthy=False)

    wait_until(lambda: server.replica()["state"] != "ready", "it is left out")


def test_of_several_servers_the_least_busy_is_asked_and_one_that_is_gone_is_left_out(remote, serve):
    first, second = remote(), remote()
    server = serve({"a": model([first.url, second.url], contract="none", concurrency=4)})
    wait_until(lambda: [one["state"] for one in server.replicas()] == ["ready", "ready"], "both are there")

    waiting = [server.begin("x", path="/infer?model=a&delay=0.5") for _ in range(4)]
    assert [one.answer().status for one in waiting] == [200] * 4
    assert (first.seen["inferences"], second.seen["inferences"]) == (2, 2)

    first.script(healthy=False)
    wait_until(lambda: server.replica(0)["state"] != "ready", "one is left out")
    assert infer(server, "a").status == 200


def test_requests_share_one_load_and_each_may_leave_it(remote, serve):
    there = remote(load_time=0.5)
    server = serve({"a": model(there.url, concurrency=4)})
    leaver = server.begin("x", path="/infer?model=a")
    stayers = [server.begin("x", path="/infer?model=a") for _ in range(3)]
    wait_until(lambda: there.seen["loads"] == 1, "the load has begun")

    leaver.reset()

    assert [one.answer().status for one in stayers] == [200] * 3
    assert there.seen["loads"] == 1


def test_a_client_that_leaves_breaks_off_its_request_at_the_server(remote, serve):
    there = remote()
    server = serve({"a": model(there.url)})
    assert infer(server, "a").status == 200

    pending = server.begin("x", path="/infer?model=a&delay=30")
    wait_until(lambda: there.seen["active_requests"] == 1, "it is at the server")
    pending.reset()

    wait_until(lambda: there.seen["broken_off"] == 1, "the server has lost its client")
    assert infer(server, "a").status == 200  # its one place is free again


@pytest.mark.parametrize("count", [2, 3])
def test_remote_models_that_are_swapped_at_random_lose_nothing(remote, serve, count):
    """While servers take as long as they like, and an operator unloads whatever is in memory."""
    names, turns = "abc"[:count], 40 // count
    servers = {name: remote() for name in names}
    models = {name: model(there.url, 16 * GIB, ttl=0.5, concurrency=2) for name, there in servers.items()}
    server = serve(models)
    chance = random.Random(count)
    outcomes, lock, over = [], threading.Lock(), threading.Event()

    def client(number, chance):
        for turn in range(turns):
            body = b"%d of %d" % (turn, number)
            answer = infer(server, chance.choice(names), body, f"&delay={chance.choice((0, 0, 0.02))}")
            with lock:
                outcomes.append((answer.status, answer.body == body))
            over.wait(chance.choice((0, 0, 0, 0.05)))

    def operator():
        while not over.wait(chance.uniform(0.02, 0.3)):
            for there in servers.values():
                there.script(load_time=chance.choice((0, 0.01, 0.1)), unload_time=chance.choice((0, 0.01, 0.1)))
            server.admin(f"/admin/models/{chance.choice(names)}/unload", "POST")

    clients = [threading.Thread(target=client, args=(number, random.Random(number))) for number in range(6)]
    meanwhile = threading.Thread(target=operator)
    for one in (*clients, meanwhile):
        one.start()
    for one in clients:
        one.join()
    over.set()
    meanwhile.join()

    assert set(outcomes) == {(200, True)}
    assert len(outcomes) == turns * len(clients)
    assert sum(there.seen["loads"] for there in servers.values()) > 10, "they took turns"
    wait_until(lambda: all(there.seen["state"] == "unloaded" for there in servers.values()), "the timers unload all")
    seen = [there.seen for there in servers.values()]
    assert sum(one["finished"] for one in seen) == len(outcomes), "each was forwarded once"
    assert all(one["unloads"] >= one["loads"] for one in seen)
