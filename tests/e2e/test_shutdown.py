"""How a server stops: what runs, what waits, who is told what, and that nothing is left."""

from __future__ import annotations

import signal

import pytest

from tests.processes import lives
from tests.serving import COMPLETIONS, fake, script, wait_until

ENDLESS = script(token_latency=0.01)


def assert_nothing_left(server, children):
    wait_until(lambda: not any(map(lives, children)), "every child is gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once_with_status_zero_and_leaves_nothing(serve, number):
    server = serve(fake(replicas=2))
    children = server.children()
    assert len(children) >= 4, "two engines and the renderers"
    assert server.stop(number) == 0
    assert_nothing_left(server, children)
    assert not server.admin_socket.exists()
    assert "Traceback" not in server.log


def test_a_stream_that_ends_in_time_is_whole_and_newcomers_are_refused(serve):
    server = serve(fake())
    other = server.connect()
    other.request("GET", "/healthz")
    other.getresponse().read()
    with server.stream(script(tokens=["x"], repeat=60, token_latency=0.02), max_tokens=100) as reader:
        reader.take(1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.log, "it has heard")
        other.request("POST", COMPLETIONS, b'{"prompt":"hi","stream":true}')
        refused = other.getresponse()
        assert refused.status == 503
        assert b'"shutting_down"' in refused.read()
        *chunks, done = reader.events()
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == 59
    assert server.process.wait(30) == 0


def test_what_does_not_end_in_time_is_told_so_and_what_waits_is_told_at_once(serve):
    server = serve(fake(slots=2, context=1_000_000) | {"shutdown_timeout": 1, "log_json": True})
    idle = server.connect()
    idle.request("GET", "/healthz")
    idle.getresponse().read()
    children = server.children()
    with server.stream(ENDLESS, max_tokens=900_000) as reader:
        reader.take(1)
        joined = server.begin(ENDLESS, max_tokens=900_000)
        server.wait_sequences(2)
        queued = [server.begin("hi", stream=stream) for stream in (True, False)]
        server.wait_queued(2)
        server.process.send_signal(signal.SIGTERM)
        for one in queued:
            answer = one.answer()
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        *chunks, error, done = reader.events()
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        answer = joined.answer()
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert server.process.wait(30) == 0
    assert idle.sock.recv(10) == b"", "the idle connection was closed"
    assert_nothing_left(server, children)
    assert len(server.records("generation finished", outcome="shutdown")) == 4


def test_a_server_stops_while_its_model_loads(serve):
    server = serve(fake(load_time=60), wait=False)
    children = server.children()
    waiting = server.begin("hi")
    server.wait_queued(1)
    server.process.send_signal(signal.SIGTERM)
    assert waiting.answer().status == 503
    assert server.process.wait(30) == 0
    assert_nothing_left(server, children)


def test_a_server_stops_under_load(serve):
    server = serve(fake(slots=2, max_queue=100) | {"shutdown_timeout": 1})
    pending = [server.begin(script(token_latency=0.01), max_tokens=4000, stream=place % 2 == 0) for place in range(20)]
    server.wait_queued(18)
    assert server.stop() == 0
    for one in pending:
        if (reader := one.events()).status == 200:
            *_, error, done = reader.events()
            assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        else:
            assert reader.status == 503
        reader.close()
    assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once(serve):
    server = serve(fake(context=1_000_000) | {"shutdown_timeout": 60})
    children = server.children()
    with server.stream(ENDLESS, max_tokens=900_000) as reader:
        reader.take(1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.log, "it has heard the first")
        assert server.stop() == 128 + signal.SIGTERM
    assert_nothing_left(server, children)
    assert not server.admin_socket.exists()


def test_an_engine_that_will_not_stop_is_killed(serve):
    server = serve(fake(ignore_sigterm=True, hang_in_unload=True))
    children = server.children()
    assert server.stop() == 0
    assert_nothing_left(server, children)


def test_a_stuck_engine_does_not_hold_the_end_up(serve):
    server = serve(fake() | {"shutdown_timeout": 0.5})
    pending = server.begin(script(hang_at=1))
    server.wait_sequences(1)
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert pending.answer().status == 503
    assert server.process.wait(30) == 0
    assert_nothing_left(server, children)


def test_when_the_front_is_killed_its_engines_and_renderers_die_with_it(serve):
    server = serve(fake(replicas=2))
    children = server.children()
    server.process.kill()
    server.process.wait(30)
    assert_nothing_left(server, children)


def test_a_server_started_with_sigchld_ignored_still_sees_its_engines_die(serve):
    server = serve(fake(), wrapper=("sh", "-c", "trap '' CHLD; exec \"$@\"", "sh"))
    pid = server.kill_engine()
    wait_until(lambda: server.replica()["pid"] not in (pid, None), "it is replaced")
    assert server.complete("hi", max_tokens=1).status == 200
    children = server.children()
    assert server.stop() == 0
    assert_nothing_left(server, children)


def test_the_admin_socket_of_a_killed_server_is_replaced(serve, tmp_path):
    path = tmp_path / "shared.sock"
    first = serve(fake() | {"admin_socket": str(path)})
    first.process.kill()
    first.process.wait(30)
    assert path.exists()
    second = serve(fake() | {"admin_socket": str(path)})
    assert second.get("/readyz").status == 200
    assert path.stat().st_mode & 0o777 == 0o600


def test_unload_drains_and_load_brings_it_back(serve):
    server = serve(fake(context=1_000_000))
    with server.stream(script(tokens=["x"], repeat=20, token_latency=0.02), max_tokens=100) as reader:
        reader.take(1)
        server.admin("/admin/models/fake/unload", "POST")
        *chunks, done = reader.events()
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    wait_until(lambda: server.replica()["state"] == "stopped", "it is unloaded")
    assert server.get("/v1/models/fake").json["status"]["value"] == "unloaded"
    server.admin("/admin/models/fake/unload", "POST")
    server.admin("/admin/models/fake/load", "POST")
    server.wait_ready()
    assert server.complete("hi", max_tokens=1).status == 200
