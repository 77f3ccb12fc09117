"""Several models in one server: their names in every spelling, aliases, the default, and the lists of them."""

from __future__ import annotations

import urllib.parse

import pytest

from tests.serving import ServerProcess, fake

NAMES = ["org/m:Q4_K_M", "a b", "ü", "..", "plain", "100%", "a?b#c", "a+b", "a/../b", "a%2Fb"]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    models = {name: {"backend": "fake", "slots": 1} for name in NAMES}
    models["plain"] |= {"aliases": ["small", "org/small:latest"], "name": "A plain one", "replicas": 2}
    models["secret"] = {"backend": "fake", "unlisted": True}
    with ServerProcess(tmp_path_factory.mktemp("several"), {"models": models, "default_model": "plain"}) as process:
        yield process.wait_ready()


def test_the_list_has_every_model_that_is_not_unlisted_in_the_files_order(several):
    answer = several.get("/v1/models").json
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == NAMES
    plain = next(model for model in answer["data"] if model["id"] == "plain")
    assert plain["object"] == "model"
    assert isinstance(plain["created"], int)
    assert plain["owned_by"] == "slimproc"
    assert plain["name"] == "A plain one"
    assert plain["queue_depth"] == 0
    assert plain["context_length"] == 4096
    assert {name: plain["status"][name] for name in ("value", "state", "ready", "residency")} == {
        "value": "loaded",
        "state": "ready",
        "ready": True,
        "residency": "resident",
    }
    assert (plain["status"]["reason"], plain["status"]["last_error"], plain["status"]["remote_state"]) == (
        "",
        None,
        None,
    )
    assert plain["status"]["reserved_bytes"] >= 0
    assert answer["queue_depth"] == 0
    assert (answer["gpu"], answer["gpus"]) == (answer["gpus"][0] if answer["gpus"] else None, answer["gpus"])


@pytest.mark.parametrize("name", NAMES)
def test_every_id_can_be_fetched_encoded_and_used_everywhere(several, name):
    for spelling in (urllib.parse.quote(name, safe=""), urllib.parse.quote(name, safe="/:+")):
        answer = several.get(f"/v1/models/{spelling}")
        assert answer.status == 200, answer.body
        assert answer.json["id"] == name
    assert several.complete("hi", model=name, max_tokens=1).json["model"] == name
    assert several.chat("hi", model=name, max_tokens=1).json["model"] == name
    assert several.post("/tokenize", {"content": "hi", "model": name}).json["count"] == 1
    assert several.admin(f"/admin/models/{urllib.parse.quote(name, safe='')}/load", "POST") == {"status": "asked"}


@pytest.mark.parametrize("name", ["org/m:Q4_K_M", "..", "a/../b"])
def test_an_id_can_be_fetched_as_it_stands(several, name):
    assert several.get(f"/v1/models/{name}").json["id"] == name


@pytest.mark.parametrize("alias", ["small", "org/small:latest"])
def test_an_alias_means_its_model_and_the_answer_says_the_models_own_name(several, alias):
    assert several.get(f"/v1/models/{urllib.parse.quote(alias, safe='')}").json["id"] == "plain"
    assert several.complete("hi", model=alias, max_tokens=1).json["model"] == "plain"


def test_an_unlisted_model_can_be_asked_by_name(several):
    assert several.get("/v1/models/secret").json["id"] == "secret"
    assert several.complete("hi", model="secret", max_tokens=1).status == 200


@pytest.mark.parametrize("name", [None, ""])
def test_without_a_name_the_default_model_is_meant(several, name):
    assert several.complete("hi", model=name, max_tokens=1).json["model"] == "plain"


@pytest.mark.parametrize("name", ["nope", " plain ", "PLAIN", "plain\n", "x" * 10_000, "*", "/", "org/m"])
def test_a_name_that_is_none_is_404_and_touches_no_model(several, name):
    tokens = [replica["tokens"] for replica in several.replicas()]
    for stream in (False, True):
        answer = several.complete("hi", model=name, stream=stream)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert len(answer.body) < 1000
    answer = several.get(f"/v1/models/{urllib.parse.quote(name[:1000], safe='')}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert [replica["tokens"] for replica in several.replicas()] == tokens


def test_with_several_models_and_no_default_a_name_is_needed(serve):
    server = serve({"models": {name: {"backend": "fake"} for name in "ab"}})
    answer = server.complete("hi")
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert server.complete("hi", model="b", max_tokens=1).json["model"] == "b"


def test_the_only_model_is_the_default_but_does_not_take_other_names(server):
    assert server.complete("hi", max_tokens=1).json["model"] == "fake"
    assert server.complete("hi", model="gpt-4o").status == 404


def test_a_star_takes_any_name(serve):
    server = serve(fake(aliases=["*"]))
    assert server.complete("hi", model="gpt-4o", max_tokens=1).json["model"] == "fake"
    assert server.get("/v1/models/gpt-4o").status == 404, "no list names it"


def test_the_admin_socket_lists_every_replica(several):
    replicas = several.replicas()
    assert [(one["model"], one["replica"]) for one in replicas if one["model"] == "plain"] == [
        ("plain", 0),
        ("plain", 1),
    ]
    assert len({one["pid"] for one in replicas}) == len(NAMES) + 2
    assert {one["state"] for one in replicas} == {"ready"}
    models = several.admin("/admin/models")["models"]
    assert [model["id"] for model in models] == [*NAMES, "secret"]
    assert several.admin("/admin/models/nope/load", "POST")["error"]["code"] == "model_not_found"
