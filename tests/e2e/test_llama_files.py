"""Files of llama.cpp's models through the whole server: such as are none, such as break later, and one in two shards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests import broken_models, models
from tests.serving import ServerProcess, wait_until


def tiny(path: Path | str, **settings) -> dict:
    return {"backend": "llama_cpp", "path": str(path), "threads": 1, **settings}


def only(path: Path, **settings) -> dict:
    return {"models": {"tiny": tiny(path, **settings)}}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return models.tiny_random(tmp_path_factory.mktemp("models") / "tiny.gguf")


# --- files that are no models -----------------------------------------------------------------------------------------


CAUSES = {
    "missing": "cannot find model '{file}': there is no file or directory of that name",
    "not in the cache": "download it first: hf download org/name m.gguf",
    "empty": "{file} is empty",
    "web page": "{file} is a web page",
    "LFS pointer": "{file} is a Git LFS pointer",
    "directory": "{file} is a directory, not a GGUF file",
    "forbidden": "{file} cannot be read: Permission denied",
    "cut off": "{file} is shorter than its tensors say",
    "without its second shard": "shard 2 of 2 is missing: {file}",
    "second shard": "{file} is shard 2 of 2: give the path of the first one",
    "aborts in load": "SIGABRT",
}


def make_wrong(folder: Path, good: Path) -> dict[str, Path]:
    """The path of each of CAUSES; in the one whose shard is missing, the shard's."""
    files = {kind: folder / f"{kind.replace(' ', '-')}.gguf" for kind in CAUSES}
    files["empty"].write_bytes(b"")
    files["web page"].write_text("<!DOCTYPE html><html>404</html>")
    files["LFS pointer"] = broken_models.lfs_download(folder)
    files["directory"].mkdir()
    files["forbidden"].write_bytes(good.read_bytes())
    files["forbidden"].chmod(0)
    files["cut off"].write_bytes(good.read_bytes()[:-4096])
    shards = [folder / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    models.tiny_random(folder / "m.gguf", shards=2)
    files["second shard"] = shards[1].rename(folder / "second.gguf")
    files["without its second shard"] = shards[1]
    broken_models.aborts_in_load(files["aborts in load"], good)
    return files


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, good):
    """``(server, files)``: a server of which every model is wrong in its own way but for ``good``, and their paths."""
    folder = tmp_path_factory.mktemp("wrong")
    files = make_wrong(folder, good)
    paths = files | {
        "not in the cache": "hf:org/name/m.gguf",
        "without its second shard": folder / "m-00001-of-00002.gguf",
    }
    config = {"models": {kind: tiny(path) for kind, path in paths.items()} | {"good": {"backend": "fake"}}}
    # Modes of files stop root only without the capability to pass over them.
    mortal = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    if mortal and shutil.which("setpriv") is None:
        mortal = ()
        del config["models"]["forbidden"]
    with ServerProcess(folder / "server", config, wrapper=mortal, HF_HUB_CACHE=str(folder / "hub")) as server:
        yield server, files


@pytest.mark.parametrize("kind", CAUSES)
def test_a_file_that_is_no_model_fails_readiness_and_requests_with_its_cause(wrong, kind):
    server, files = wrong
    if kind not in server.get("/readyz").json["models"]:
        pytest.skip("root reads everything, and there is no setpriv (util-linux) to make it less")
    words = CAUSES[kind].format(file=files[kind].name)  # callers hear of no folders
    told = lambda: server.get("/readyz").json["models"][kind].get("reason")  # noqa: E731
    assert words in wait_until(told, "a cause is told")

    answer = server.complete("a", model=kind)

    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
    assert words in answer.error["message"]
    assert server.get("/readyz").status == 503
    assert server.get("/healthz").status == 200
    assert server.get(f"/v1/models/{kind.replace(' ', '%20')}").status == 200
    assert server.complete("a", model="good").status == 200, "its neighbour serves"


# --- files that break later -------------------------------------------------------------------------------------------


def test_a_model_that_kills_its_engine_in_the_first_step_is_tried_twice_and_told(serve, tmp_path, good):
    server = serve(only(broken_models.aborts_in_first_step(tmp_path / "eps.gguf", good)))

    answer = server.complete("a")

    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert "SIGABRT" in answer.error["message"]
    assert server.replica()["restarts"] >= 1
    assert server.get("/healthz").status == 200


def test_a_file_truncated_under_a_running_engine_costs_that_engine_only(serve, tmp_path, good):
    path = tmp_path / "model.gguf"
    path.write_bytes(good.read_bytes())
    server = serve({"models": {"tiny": tiny(path), "good": tiny(good)}})
    os.truncate(path, 4096)

    answer = server.complete("a" * 100, model="tiny", max_tokens=50)

    assert answer.status in (500, 503)
    wait_until(lambda: server.replica()["state"] in ("backoff", "failed"), "the engine is given up")
    assert server.get("/healthz").status == 200
    assert server.complete("a", model="good", max_tokens=4).json["usage"]["completion_tokens"]
    broken, whole = server.replicas()
    assert (broken["model"], whole["model"], whole["state"], whole["restarts"]) == ("tiny", "good", "ready", 0)


# --- a model in shards ------------------------------------------------------------------------------------------------


def test_a_model_in_two_shards_in_the_hugging_face_cache_says_what_it_says_in_one_file(serve, tmp_path, good):
    """The shards are links there, to files whose names are hashes."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot, blobs, refs = repository / "snapshots" / "c0ffee", repository / "blobs", repository / "refs"
    for folder in (snapshot, blobs, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text("c0ffee")
    first = models.tiny_random(tmp_path / "tiny.gguf", shards=2)
    for number, shard in enumerate((first, first.with_name("tiny-00002-of-00002.gguf"))):
        shard.rename(blobs / f"{number}abc")
        (snapshot / shard.name).symlink_to(f"../../blobs/{number}abc")
    config = {"models": {"whole": tiny(good), "split": tiny(f"hf:org/name/{first.name}")}}

    server = serve(config, HF_HUB_CACHE=str(tmp_path / "hub"))

    wanted = {"max_tokens": 24, "temperature": 0, "logprobs": 0}
    whole, split = (server.complete("abc", model=model, **wanted).json["choices"][0] for model in ("whole", "split"))
    assert split["text"] == whole["text"]
    assert split["logprobs"]["token_logprobs"] == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-3)
