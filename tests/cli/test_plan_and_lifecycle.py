"""slimproc plan, load and unload, against a server that runs: what they say, and their exit statuses."""

import json

import pytest

from tests.serving import ServerProcess, wait_until
from tests.upstream.standin import standin_process

GIB = 1 << 30


def fake(gib, **settings):
    return {"backend": "fake", "memory": {"load_peak": gib * GIB, "inference_peak": gib * GIB}} | settings


@pytest.fixture(scope="module")
def stuck():
    """A server that does not unload its model."""
    with standin_process(state="ready", unload_refused=[500, "STUCK"]) as url:
        yield url


@pytest.fixture(scope="module")
def running(tmp_path_factory, stuck):
    models = {
        "a": fake(2),
        "b": fake(2),
        "large": fake(4, aliases=["other"]),
        "broken": fake(1, fake={"load_error": "no such file"}),
        "org/stuck:Q4": {
            "remote": {"base_url": stuck},
            "inference_path": "/x",
            "max_body": "1MiB",
            "pin": True,
            "memory": {"load_peak": GIB, "inference_peak": GIB},
        },
    }
    config = {"models": models, "preload": [], "memory": {"host_limit": 4 * GIB, "margin": 0}}
    with ServerProcess(tmp_path_factory.mktemp("server"), config) as server:
        wait_until(lambda: server.replica(4)["state"] == "ready", "the remote model is adopted")
        yield server


@pytest.fixture
def tell(slimproc, running):
    """Run a command against the server."""
    return lambda *arguments: slimproc(*arguments, "--admin-socket", str(running.admin_socket))


def test_a_model_is_loaded_and_unloaded_and_each_is_waited_for(tell, running):
    loaded = tell("load", "a")
    assert (loaded.status, loaded.out, loaded.err) == (0, "a: loaded\n", "")
    assert running.replica(0)["state"] == "ready"
    again = tell("load", "a")
    assert (again.status, again.out) == (0, "a: loaded\n")

    for _ in range(2):
        unloaded = tell("unload", "a")
        assert (unloaded.status, unloaded.out, unloaded.err) == (0, "a: unloaded\n", "")
        assert running.replica(0)["state"] == "stopped"


def test_nobody_has_to_wait(tell, running):
    assert tell("load", "a", "--no-wait").out == "a: asked\n"
    wait_until(lambda: running.replica(0)["state"] == "ready", "it is loaded")
    assert tell("unload", "a", "--no-wait").out == "a: asked\n"
    wait_until(lambda: running.replica(0)["state"] == "stopped", "it is unloaded")


def test_a_plan_tells_what_would_happen_with_its_numbers(tell):
    fits = tell("plan", "b")
    assert (fits.status, fits.err) == (0, "")
    assert fits.out.startswith("b: load. b needs 2.00 GiB on host")
    rows = dict(line.split(maxsplit=1) for line in fits.out.splitlines()[1:] if len(line.split()) > 1)
    assert "─" not in fits.out, "two columns without names have no heading"
    assert rows["needed"].split() == ["2,048.0", "MiB"]
    assert rows["total"].split() == ["4,096.0", "MiB"]

    assert tell("load", "a").status == 0
    in_the_way = tell("plan", "b", "--json")
    found = json.loads(in_the_way.out)
    assert (in_the_way.status, found["verdict"], found["victims"], found["code"]) == (0, "evict", ["a/0"], None)
    assert json.loads(tell("plan", "a", "--json").out)["verdict"] == "resident"
    assert tell("unload", "a").status == 0


def test_a_plan_for_what_can_never_be_had_has_a_status_of_its_own(tell):
    refused = tell("plan", "large", "--json")
    found = json.loads(refused.out)
    assert (refused.status, refused.err) == (2, "")
    assert (found["verdict"], found["code"], found["needed"]) == ("refuse", "insufficient_memory", 4 * GIB)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("load", "large"), "1.00 GiB would be missing if all went that may go (pinned: org/stuck:Q4/0)"),
        (("load", "broken"), "the model broken could not be loaded: no such file"),
        (("unload", "org/stuck:Q4"), "the model org/stuck:Q4 could not be unloaded"),
        (("load", "nobody"), "no model is configured as 'nobody'"),
        (("unload", "nobody"), "no model is configured as 'nobody'"),
        (("load", ""), "no model is configured as ''"),
        (("load", "a\nb"), "no model is configured as 'a\\nb'"),
        (("load", "\udcff"), "no model is configured as '%"),
        (("load", "other"), "no model is configured as 'other'; it is an alias of 'large'"),
        (("plan", "\udcff"), "there is no model '\ufffd' here"),
        (("plan", "nobody"), "there is no model 'nobody' here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_come_about_is_one_line_that_says_why(tell, arguments, words):
    result = tell(*arguments)
    assert (result.status, result.out, len(result.err.splitlines())) == (1, "", 1)
    assert result.err.startswith("slimproc: ")
    assert words in result.err


@pytest.mark.parametrize("verb", ["plan", "load", "unload"])
def test_without_a_server_each_is_one_line(slimproc, here, verb):
    result = slimproc(verb, "a", "--admin-socket", str(here / "none.sock"))
    assert (result.status, result.out) == (1, "")
    assert result.err == f"slimproc: no server answers at {here}/none.sock: No such file or directory\n"


@pytest.mark.parametrize("verb", ["plan", "load", "unload"])
def test_what_is_no_slimproc_server_is_told_so(slimproc, admin, here, verb):
    admin(here / "other.sock", b"hello", status=200)
    result = slimproc(verb, "a", "--admin-socket", str(here / "other.sock"))
    assert (result.status, result.out) == (1, "")
    assert "no slimproc server (status" in result.err
