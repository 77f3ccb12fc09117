"""Loads that fail: how often they are tried, who is told, and when the past is forgiven."""

from __future__ import annotations

import os
import signal

import pytest

from slimproc.replicas.restart import RestartPolicy
from tests.fakes import eventually, looped
from tests.models import scripted, skip_without_llama_cpp
from tests.replicas.harness import Keeper
from tests.serving import wait_until


@pytest.mark.slow
def test_a_model_that_always_dies_in_its_load_is_given_up_with_one_line_a_try_and_the_others_serve_on(serve):
    models = {"good": {"backend": "fake"}, "bad": {"backend": "fake", "fake": {"die_in_load": int(signal.SIGSEGV)}}}
    server = serve({"models": models, "log_json": True}, wait=False)
    pid = wait_until(lambda: server.replica(0)["state"] == "ready" and server.replica(0)["pid"], "the good one serves")
    while server.replica(1)["state"] != "failed":
        assert server.complete("hi", model="good", max_tokens=1).status == 200

    assert len(server.records("an engine is lost", replica="bad/0")) == 5
    assert len(server.records("a replica changes", replica="bad/0", after="starting")) == 5
    refused = server.complete("hi", model="bad")
    assert (refused.status, refused.error["code"]) == (503, "service_unavailable")
    assert "SIGSEGV" in refused.error["message"]
    assert server.get("/readyz").json["models"]["good"]["ready"]
    assert (server.replica(0)["pid"], server.replica(0)["restarts"]) == (pid, 0)
    server.admin("/admin/models/bad/load", "POST")
    wait_until(lambda: len(server.records("an engine is lost", replica="bad/0")) > 5, "an operator has it tried again")


@looped
async def test_an_engine_that_was_ready_for_long_and_has_served_begins_with_a_clean_record():
    """Two deaths, good service, and two more: with a limit of three it would have been given up without the forgiveness."""
    async with Keeper(policy=RestartPolicy(first_wait=0.0, limit=3, healthy_after=0.2)) as keeper:
        engine = await keeper.start()
        for _ in range(2):
            for _ in range(2):
                os.kill(engine.process.pid, signal.SIGKILL)
                engine = await keeper.until_ready(after=engine)
            stream = keeper.generate()
            await eventually(lambda one=stream: one.ended, "it serves")

            def forgiven() -> bool:
                keeper.replica.served()  # as admission says after every request that went well
                return keeper.replica._policy.failures == 0

            await eventually(forgiven, "it has been ready for long enough")
        assert keeper.replica.statistics().restarts == 4


@pytest.mark.slow
def test_a_model_whose_file_was_missing_or_broken_is_served_when_somebody_asks_after_it_is_there(serve, tmp_path):
    skip_without_llama_cpp()
    file = tmp_path / "late.gguf"
    server = serve({"models": {"late": {"backend": "llama_cpp", "path": str(file)}}, "log_json": True}, wait=False)
    wait_until(lambda: server.replica()["state"] == "failed", "its load has failed")
    for _ in range(2):
        refused = server.complete("hi", max_tokens=1)
        assert refused.status == 503
        assert "late.gguf" in refused.error["message"]
    assert len(server.records("a replica changes", after="starting")) == 1, "it is not tried again in vain"

    file.write_bytes(b"no model")
    assert server.complete("hi", max_tokens=1).status == 503
    assert len(server.records("a replica changes", after="starting")) == 2
    assert server.complete("hi", max_tokens=1).status == 503
    assert len(server.records("a replica changes", after="starting")) == 2

    scripted(file)
    assert server.complete("hi", max_tokens=1).status == 200
