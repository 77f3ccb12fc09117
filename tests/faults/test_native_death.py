"""llama.cpp takes its process along: what the file did is told, and nobody else is hurt."""

from __future__ import annotations

import os

import pytest

from tests import broken_models, models
from tests.faults.leftovers import Leftovers
from tests.serving import fake, script, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return models.tiny_random(tmp_path_factory.mktemp("models") / "good.gguf")


def beside_a_fake(path, **settings):
    """A native model, and a fake one that must not notice anything."""
    config = fake(context=1_000_000)
    config["models"]["native"] = {"backend": "llama_cpp", "path": str(path), "threads": 1, **settings}
    return config | {"log_json": True}


def bystander(server):
    reader = server.stream(script(token_latency=0.01), model="fake", max_tokens=900_000)
    reader.take(1)
    return reader


def assert_untouched(server, reader):
    assert len(reader.take(3)) == 3
    reader.close()
    server.wait_idle()
    assert server.replica(0)["restarts"] == 0


def test_a_file_that_aborts_the_process_in_its_load_is_told_with_the_assertion_that_failed(serve, good, tmp_path):
    server = serve(beside_a_fake(broken_models.aborts_in_load(tmp_path / "bad.gguf", good)), wait=False)
    wait_until(lambda: server.replica(0)["state"] == "ready", "the other one serves")
    reader = bystander(server)
    answer = server.complete("a", model="native")
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
    reason = wait_until(lambda: server.get("/readyz").json["models"]["native"].get("reason"), "the cause is shown")
    assert reason in answer.error["message"]
    assert "SIGABRT" in reason
    assert "id_to_token.size() == token_to_id.size()" in reason, "the engine's last words"
    assert_untouched(server, reader)


def test_a_file_that_aborts_the_process_in_its_first_step_costs_two_engines_and_is_told(serve, good, tmp_path):
    server = serve(beside_a_fake(broken_models.aborts_in_first_step(tmp_path / "bad.gguf", good)))
    reader = bystander(server)
    answer = server.complete("a", model="native")
    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert "SIGABRT" in answer.error["message"]
    assert "binary_op: unsupported types" in answer.error["message"], "the engine's last words"
    assert server.metric("engine_restarts_total", model="native", reason="exited") == 2
    assert_untouched(server, reader)


def test_a_mapped_file_that_is_cut_off_ends_its_engine_by_sigbus_and_mended_it_serves_again(serve, tmp_path):
    """Of some size: the pages of a small one are all in the process by then."""
    path = models.tiny_random(tmp_path / "model.gguf", size=512, layers=4)
    whole = path.read_bytes()
    server = serve(beside_a_fake(path, slots=1, context=2048))
    leftovers = Leftovers(server)
    reader = bystander(server)
    stream = server.stream("once", model="native", max_tokens=1900, ignore_eos=True)
    stream.take(1)
    os.truncate(path, 8192)
    *_, error, done = stream.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    assert "SIGBUS" in error["error"]["message"]
    wait_until(lambda: server.replica(1)["state"] in ("backoff", "failed"), "it cannot be loaded from such a file")
    assert server.get("/healthz").status == 200
    assert_untouched(server, reader)

    path.write_bytes(whole)
    server.admin("/admin/models/native/load?wait=true", "POST")
    assert server.complete("once", model="native", max_tokens=2).status == 200
    leftovers.assert_none()
