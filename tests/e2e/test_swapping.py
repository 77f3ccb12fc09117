"""Several models that do not fit together: whoever is asked for is loaded, who must go goes, and nobody is cut off."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving import ServerProcess, script, wait_until

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

MIB = 1 << 20


def models(**each):
    """A host with room for 1,000 MiB, and fake models: ``a={"bytes": 700}``; keys of the fake's own go into its block."""
    own = {"load_time", "load_error", "die_in_load", "ignore_sigterm", "hang_in_unload", "unload_time", "token_latency"}
    found = {}
    for name, settings in each.items():
        block = {"bytes": settings.pop("bytes", 700) * MIB}
        block |= {key: settings.pop(key) for key in list(settings) if key in own}
        found[name] = {"backend": "fake", "fake": block, **settings}
    return {"log_json": True, "memory": {"margin": 0, "host_limit": 1000 * MIB}, "models": found}


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(config, **environ):
        server = ServerProcess(tmp_path / str(len(servers)), config, **environ)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def ask(server, model, prompt="hi", **fields):
    return server.post("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 3} | fields)


def states(server):
    return {replica["model"]: replica["state"] for replica in server.replicas()}


def held(server):
    return server.metric("memory_bytes", device="host", kind="held")


def wait_state(server, model, state):
    wait_until(lambda: states(server)[model] == state, f"{model} is {state}; the log says {server.log}")


# --- who is loaded, and who goes --------------------------------------------------------------------------------------


def test_at_the_start_models_are_loaded_in_the_files_order_as_far_as_they_fit(serve):
    server = serve(models(a={"bytes": 400}, b={"bytes": 700}, c={"bytes": 500}))

    server.wait_ready()

    assert states(server) == {"a": "ready", "b": "stopped", "c": "ready"}


def test_only_what_is_listed_is_preloaded_and_the_server_is_ready_with_that(serve):
    server = serve(models(a={}, b={}) | {"preload": ["b"]})

    server.wait_ready()

    assert states(server) == {"a": "stopped", "b": "ready"}


def test_a_model_that_is_not_in_memory_is_loaded_for_a_request_and_takes_the_others_place(serve):
    server = serve(models(a={}, b={})).wait_ready()

    for model in "abab":
        assert ask(server, model).status == 200
        assert states(server) == {"a": "stopped", "b": "stopped"} | {model: "ready"}

    assert server.metric("evictions_total", model="a") == 2
    assert server.metric("evictions_total", model="b") == 1


def test_as_many_are_evicted_as_needed_least_recently_used_first_and_no_more(serve):
    server = serve(models(a={"bytes": 300}, b={"bytes": 300}, c={"bytes": 300}, d={"bytes": 350})).wait_ready()
    for model in "bac":
        assert ask(server, model).status == 200

    assert ask(server, "d").status == 200

    assert states(server) == {"a": "ready", "b": "stopped", "c": "ready", "d": "ready"}


def test_a_pinned_model_stays_and_who_cannot_fit_beside_it_is_refused_with_the_plan(serve):
    server = serve(models(a={"pin": True}, b={})).wait_ready()

    answer = ask(server, "b")

    assert answer.status == 503
    assert answer.error["code"] == "insufficient_memory"
    assert answer.json["plan"]["needed"] == 700 * MIB
    assert answer.json["plan"]["total"] == 1000 * MIB
    assert states(server) == {"a": "ready", "b": "stopped"}
    assert ask(server, "a").status == 200


def test_who_can_never_fit_is_refused_at_once_and_nobody_goes_for_it(serve):
    server = serve(models(a={}, huge={"bytes": 3000})).wait_ready()

    assert ask(server, "huge").error["code"] == "insufficient_memory"
    assert states(server)["a"] == "ready"


def test_replicas_of_one_model_each_have_their_own_hold(serve):
    server = serve(models(a={"bytes": 400, "replicas": 2}, b={"bytes": 400})).wait_ready()
    assert held(server) == 800 * MIB

    assert ask(server, "b").status == 200

    assert sorted(replica["state"] for replica in server.replicas() if replica["model"] == "a") == ["ready", "stopped"]
    assert ask(server, "a").status == 200


# --- busy and idle ----------------------------------------------------------------------------------------------------


def test_a_stream_is_finished_before_its_model_makes_room(serve):
    server = serve(models(a={"token_latency": 0.02}, b={})).wait_ready()
    with server.stream("hi", model="a", max_tokens=60) as stream:
        stream.take(3)
        waiting = server.begin("hi", model="b", max_tokens=3)
        wait_state(server, "a", "draining")
        rest = list(stream.events())

    assert rest[-1] == "[DONE]"
    assert len(rest) >= 57
    assert waiting.answer().status == 200


def test_who_comes_for_the_victim_waits_its_turn_and_is_served_after(serve):
    server = serve(models(a={"token_latency": 0.02}, b={})).wait_ready()
    with server.stream("hi", model="a", max_tokens=40) as stream:
        stream.take(3)
        first = server.begin("hi", model="b", max_tokens=3)
        wait_state(server, "a", "draining")
        second = server.begin("hi", model="a", max_tokens=3)
        list(stream.events())

    assert first.answer().status == 200
    assert second.answer().status == 200
    finished = [line["model"] for line in server.records("generation finished")]
    assert finished == ["a", "b", "a"]


def test_a_victim_that_stays_busy_past_the_drain_limit_serves_on_and_the_waiter_is_told(serve):
    config = models(a={"token_latency": 0.05}, b={}) | {"drain_timeout": 0.5}
    server = serve(config).wait_ready()
    with server.stream("hi", model="a", max_tokens=60) as stream:
        stream.take(3)
        answer = server.post("/infer?model=b", {"messages": [{"role": "user", "content": "hi"}]})
        rest = list(stream.events())

    assert (answer.status, answer.json["code"], answer.json["src"]) == (504, "DRAIN_TIMEOUT", "slimproc")
    assert rest[-1] == "[DONE]"
    assert states(server) == {"a": "ready", "b": "stopped"}
    assert ask(server, "b").status == 200


def test_a_drain_ends_when_nobody_waits_for_its_bytes_any_more(serve):
    server = serve(models(a={"token_latency": 0.02}, b={})).wait_ready()
    with server.stream("hi", model="a", max_tokens=100) as stream:
        stream.take(3)
        waiting = server.begin("hi", model="b")
        wait_state(server, "a", "draining")
        waiting.reset()
        wait_state(server, "a", "ready")
        assert list(stream.events())[-1] == "[DONE]"

    assert states(server) == {"a": "ready", "b": "stopped"}


def test_a_model_stays_for_min_resident_seconds(serve):
    server = serve(models(a={"min_resident": 1.5}, b={})).wait_ready()
    ready_at = time.monotonic() - server.replica()["since"]

    assert ask(server, "b").status == 200

    assert time.monotonic() - ready_at >= 1.5


def test_the_ttl_counts_from_the_end_of_the_last_request(serve):
    server = serve(models(a={"ttl": 0.5, "token_latency": 0.02})).wait_ready()
    answered = ask(server, "a", max_tokens=60)  # longer than its ttl

    assert answered.status == 200
    assert states(server)["a"] == "ready"
    wait_state(server, "a", "stopped")
    assert server.get("/readyz").status == 200
    assert ask(server, "a").status == 200


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_requests_around_the_end_of_a_ttl_are_all_answered(serve, rounds):
    server = serve(models(a={"ttl": 0.15, "unload_time": 0.05}))
    server.wait_ready()
    chance = random.Random(49)

    for _ in range(rounds):
        assert ask(server, "a").status == 200
        time.sleep(0.15 + chance.uniform(-0.1, 0.1))  # the timer's own length is what is tried

    loads = server.metric("model_loads_total", model="a", outcome="ok")
    wait_state(server, "a", "stopped")
    unloads = len(server.records("a replica changes", after="stopped"))
    assert loads == unloads
    assert unloads > 1
    assert server.metric("evictions_total", model="a") == 0
    wait_until(lambda: held(server) == 0, "no byte is held when nothing is in memory")


def test_with_strict_order_nobody_passes_an_older_request(serve):
    config = models(a={"token_latency": 0.02, "slots": 2}, b={"load_time": 0.3}) | {"order": "strict"}
    server = serve(config).wait_ready()
    with server.stream("hi", model="a", max_tokens=40) as stream:
        stream.take(3)
        first = server.begin("hi", model="b", max_tokens=3)
        server.wait_queued(1, "b")
        second = server.begin("hi", model="a", max_tokens=3)  # a slot is free, but b's request is older
        server.wait_queued(1, "a")
        list(stream.events())

    assert (first.answer().status, second.answer().status) == (200, 200)
    assert [line["model"] for line in server.records("generation finished")] == ["a", "b", "a"]


# --- when it goes wrong -----------------------------------------------------------------------------------------------


def test_a_load_that_dies_is_told_at_once_gives_its_bytes_back_and_is_tried_again(serve):
    server = serve(models(a={"die_in_load": 11, "load_time": 0.2}, b={}) | {"preload": []})

    answer = server.post("/infer?model=a", {"messages": [{"role": "user", "content": "hi"}]})

    assert (answer.status, answer.json["code"]) == (502, "LOAD_FAILED")
    assert "SIGSEGV" in answer.json["error"]
    assert ask(server, "b").status == 200  # it is in back-off, and may be evicted at once


def test_an_engine_that_will_not_stop_is_killed_and_the_rest_goes_on_meanwhile(serve):
    config = models(a={"ignore_sigterm": True, "hang_in_unload": True, "unload_timeout": 1.0}, b={}, c={"bytes": 100})
    server = serve(config).wait_ready()
    waiting = server.begin("hi", model="b", max_tokens=3)
    wait_state(server, "a", "stopping")

    assert ask(server, "c").status == 200
    assert server.get("/health").status == 200
    assert server.get("/metrics").status == 200
    assert server.get("/v1/models").status == 200
    assert waiting.answer().status == 200
    assert states(server)["a"] == "stopped"


def test_an_engine_that_dies_keeps_its_hold_and_comes_back(serve):
    server = serve(models(a={}, b={"bytes": 200})).wait_ready()
    before = server.replica()["pid"]

    server.kill_engine()

    wait_until(lambda: server.replica()["restarts"] == 1 and server.replica()["state"] == "ready", "it is back")
    assert server.replica()["pid"] != before
    assert held(server) == 900 * MIB


@pytest.mark.parametrize("moment", ["starting", "draining", "stopping", "backoff"])
def test_an_engine_that_is_killed_at_any_moment_costs_nobody_else_anything(serve, moment):
    a = {"load_time": 0.3, "hang_in_unload": moment == "stopping", "token_latency": 0.02}
    server = serve(models(a=a, b={}) | {"preload": []})
    first = server.begin("hi", model="a", max_tokens=100 if moment == "draining" else 3)
    if moment == "starting":
        wait_state(server, "a", "starting")
        server.kill_engine()
    elif moment == "draining":
        wait_state(server, "a", "ready")
    else:
        assert first.answer().status == 200
    if moment == "backoff":
        for restarts in (1, 2):  # the first restart is at once
            server.kill_engine()
            passed = {("backoff", restarts - 1), ("ready", restarts)}
            seen = lambda: (server.replica()["state"], server.replica()["restarts"])  # noqa: E731
            wait_until(lambda passed=passed, seen=seen: seen() in passed, "its death is noticed")
    waiting = server.begin("hi", model="b", max_tokens=3)
    if moment in ("draining", "stopping"):
        wait_state(server, "a", moment)
        server.kill_engine()

    assert waiting.answer().status == 200
    assert states(server) == {"a": "stopped", "b": "ready"}
    wait_until(lambda: held(server) == 700 * MIB, "only b is held")
    assert ask(server, "a").status == 200


@pytest.mark.parametrize("moment", ["starting", "draining", "stopping", "backoff"])
def test_a_shutdown_at_any_moment_leaves_no_process(serve, moment):
    a = {"load_time": 5.0 if moment == "starting" else 0.0, "unload_time": 0.5, "token_latency": 0.02}
    a |= {"die_in_load": 11} if moment == "backoff" else {}
    server = serve(models(a=a, b={}) | {"preload": [], "shutdown_timeout": 0.5})
    first = server.begin("hi", model="a", max_tokens=200 if moment == "draining" else 3)
    if moment in ("draining", "stopping"):
        wait_state(server, "a", "ready")
        server.begin("hi", model="b", max_tokens=3)
    elif moment == "backoff":
        assert first.answer().status == 503
    wait_state(server, "a", moment)
    children = server.children()

    assert server.stop() == 0

    assert [child for child in children if child.is_running()] == []
    assert "Traceback" not in server.log


def test_an_operator_unloads_and_loads_and_asks_what_would_happen(serve):
    server = serve(models(a={}, b={})).wait_ready()

    assert server.admin("/admin/models/a/unload?wait=true", "POST")["status"] == "unloaded"
    assert server.admin("/admin/models/a/unload?wait=true", "POST")["status"] == "unloaded"
    assert server.admin("/admin/plan?model=b")["verdict"] == "load"
    assert server.admin("/admin/models/b/load?wait=true", "POST")["status"] == "loaded"
    plan = server.admin("/admin/plan?model=a")
    assert (plan["verdict"], plan["victims"]) == ("evict", ["b/0"]), plan
    assert plan["needed"] == 700 * MIB


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_clients_that_swap_models_at_random_lose_nothing_while_timers_and_unloads_are_in_play(serve, names):
    settings = {"ttl": 0.3, "unload_time": 0.02, "load_time": 0.02, "slots": 2}
    server = serve(models(**{name: dict(settings) for name in names}))
    rounds, failures, lock = 100, [], threading.Lock()

    def client(seed):
        chance = random.Random(seed)
        for _ in range(rounds // 4):
            answer = ask(server, chance.choice(names), script(tokens=["x"], repeat=3, token_latency=0.001))
            if answer.status != 200 or answer.text != "xxx":
                with lock:
                    failures.append((answer.status, answer.body))
            time.sleep(chance.expovariate(50))  # the jitter

    def operator():
        chance = random.Random(0)
        for _ in range(10):
            server.admin(f"/admin/models/{chance.choice(names)}/unload", "POST")
            time.sleep(0.2)  # between two unloads

    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(client, seed) for seed in range(4)] + [pool.submit(operator)]
        for job in jobs:
            job.result()

    assert failures == []
    for name in names:
        wait_state(server, name, "stopped")
    wait_until(lambda: held(server) == 0, "no byte is held when nothing is in memory")
    changes = [len(server.records("a replica changes", after=state)) for state in ("starting", "stopped")]
    assert changes[0] == changes[1] > 1  # each start has its end
    ended = json.dumps(server.records("generation finished", outcome="ok")).count("request_id")
    assert ended == rounds
    assert server.children() == [] or all("engines" not in " ".join(child.cmdline()) for child in server.children())
