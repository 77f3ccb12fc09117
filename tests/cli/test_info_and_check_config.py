"""check-config, info and the application itself."""

import json
from pathlib import Path

from slimproc import __version__
from slimproc.config.model import MODEL_KINDS, UPSTREAM_KEYS
from slimproc.config.whole import KINDS


def test_check_config_says_ok_and_what_it_comes_to(slimproc, here):
    (here / "m.gguf").touch()
    (here / "x.yaml").write_text(
        "listen: ':9'\ndefault_model: m\nmodels:\n"
        "  m: {backend: llama_cpp, path: m.gguf, slots: 2, context: 64, aliases: [small]}\n"
        "  n: {backend: fake}\n"
    )
    result = slimproc("check-config", "x.yaml")
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines() == [
        "ok: x.yaml",
        "listen :9, default model m",
        "m: llama_cpp, replicas 1, slots 2, context 64, also called small",
        "n: fake, replicas 1, slots 4, context the model's own, up to 4096",
    ]


def test_check_config_says_in_words_that_a_model_takes_every_other_name(slimproc, here):
    (here / "x.yaml").write_text("models: {m: {backend: fake, aliases: [small, '*']}, n: {backend: fake}}")
    lines = slimproc("check-config", "x.yaml").out.splitlines()
    assert lines[2].endswith(", also called small, answers to any other name")
    assert "other name" not in lines[3]


def test_check_config_takes_the_file_here_and_says_every_problem(slimproc, here):
    (here / "slimproc.yaml").write_text("listn: 1\nlog_json: no\nmodels: {m: {backend: fake}}\n")
    result = slimproc("check-config")
    assert (result.status, result.out) == (78, "")
    assert [line.split(":")[1] for line in result.err.splitlines()] == ["1", "2"]


def test_check_config_of_a_model_that_is_not_there_is_right_with_a_note(slimproc, here):
    (here / "x.yaml").write_text("models: {m: {backend: llama_cpp, path: none.gguf}}")
    result = slimproc("check-config", "x.yaml")
    assert result.status == 0
    assert f"note: cannot find model '{here}/none.gguf'" in result.out


def test_check_config_of_a_file_that_is_not_there_is_wrong(slimproc):
    result = slimproc("check-config", "nothing.yaml")
    assert result.status == 78
    assert result.err == "nothing.yaml: cannot read the configuration: No such file or directory\n"


SERVERS = """
models:
  asr:
    remote: {base_url: "http://127.0.0.1:8080", prepare: {argv: [/no/such/prepare]}}
    inference_path: /align
    max_body: 1GiB
    memory: {load_peak: 2GiB, inference_peak: 3GiB}
    device: GPU-1
  there: {remote: {base_url: ["http://a:1", "http://b:1"], contract: none}, inference_path: /x, max_body: 1, concurrency: 4}
  started: {command: {argv: [no-such-server, "${PORT}"]}, inference_path: /x, max_body: 1, memory: {load_peak: 1, inference_peak: 0}}
"""


def test_check_config_shows_servers_and_what_of_them_is_not_on_this_machine(slimproc, here):
    (here / "x.yaml").write_text(SERVERS)
    result = slimproc("check-config", "x.yaml")
    assert result.status == 0
    assert result.out.splitlines()[2:] == [
        "asr: remote http://127.0.0.1:8080, contract control, concurrency 1, memory 3GiB each, on GPU-1",
        "  note: there is no program /no/such/prepare",
        "there: remote http://a:1 http://b:1, contract none, concurrency 4",
        "started: command no-such-server, concurrency 1, memory 1 each",
        "  note: there is no program no-such-server",
    ]


def test_check_config_prints_the_schema_that_is_in_the_documentation(slimproc, here):
    (here / "slimproc.yaml").write_text("nonsense")  # which is not looked at
    result = slimproc("check-config", "--schema")
    assert (result.status, result.err) == (0, "")
    assert result.out == (Path(__file__).parents[2] / "docs" / "slimproc.schema.json").read_text("utf-8")


def test_check_config_takes_no_file_beside_the_schema(slimproc, here):
    result = slimproc("check-config", "--schema", "x.yaml")
    assert (result.status, result.out) == (2, "")
    assert result.err == "slimproc check-config: --schema is of no file: leave one of the two out\n"


def test_check_config_misses_an_adapter(slimproc, here):
    (here / "m.gguf").touch()
    (here / "x.yaml").write_text("models: {m: {backend: llama_cpp, path: m.gguf, lora: [a.gguf]}}")
    assert f"note: cannot find model '{here}/a.gguf'" in slimproc("check-config", "x.yaml").out


def test_info_shows_each_model_the_keys_that_its_kind_takes(slimproc, here):
    (here / "slimproc.yaml").write_text(SERVERS)
    models = json.loads(slimproc("info", "--json").out)["models"]
    everywhere = {
        "name",
        "aliases",
        "unlisted",
        "max_queue",
        "inference_path",
        "request_timeout",
        "concurrency",
        "max_body",
    }
    managed = {"memory", "device", "pin", "ttl", "min_resident", "load_timeout", "unload_timeout", "prepare_timeout"}
    assert models["asr"].keys() == everywhere | managed | {"remote"}
    assert models["there"].keys() == everywhere | {"remote"}
    assert models["started"].keys() == everywhere | (managed - {"prepare_timeout"}) | {"command"}
    assert models["asr"]["remote"]["value"]["base_urls"] == ["http://127.0.0.1:8080"]
    assert models["asr"]["memory"] == {
        "value": {
            "load_peak": 2 << 30,
            "inference_peak": 3 << 30,
            "residual": 0,
            "max_concurrency": 1,
            "profile_id": "",
        },
        "origin": "slimproc.yaml line 7",
    }
    rows = [line.split() for line in slimproc("info").out.splitlines()]
    assert ["device", "GPU-1", "slimproc.yaml", "line", "8"] in rows


def test_info_as_json_has_the_machine_the_versions_and_every_setting_with_its_origin(slimproc, here, monkeypatch):
    (here / "slimproc.yaml").write_text(
        "log_json: true\nmodels:\n  m:\n    backend: fake\n    threads: 3\n    fake: {ttft: 1}\n"
    )
    monkeypatch.setenv("SLIMPROC_LISTEN", "[::1]:7")
    result = slimproc("info", "--json")
    assert result.status == 0
    report = json.loads(result.out)
    assert report["file"] == "slimproc.yaml"
    assert report["versions"]["slimproc"] == __version__
    assert {"python", "aiohttp", "uvloop", "msgspec", "llama-cpp-python", "kernel"} <= report["versions"].keys()
    assert report["hardware"]["cpu"]
    assert report["hardware"]["threads"] >= report["hardware"]["usable_threads"] >= 1
    assert 1 <= report["hardware"]["engine_threads"] <= report["hardware"]["usable_threads"]
    assert report["hardware"]["memory_bytes"] > 1 << 20
    assert report["config"].keys() == {*KINDS, "memory"}
    assert report["config"]["listen"] == {"value": "[::1]:7", "origin": "environment SLIMPROC_LISTEN"}
    assert report["config"]["log_json"] == {"value": True, "origin": "slimproc.yaml line 1"}
    assert report["config"]["credit"] == {"value": "auto", "origin": "default"}
    assert report["config"]["admin_socket"]["value"].endswith("/slimproc/admin-7.sock")
    assert report["models"]["m"].keys() == {*MODEL_KINDS, "fake", "memory"} - UPSTREAM_KEYS
    assert report["models"]["m"]["backend"] == {"value": "fake", "origin": "slimproc.yaml line 4"}
    assert report["models"]["m"]["threads"] == {"value": 3, "origin": "slimproc.yaml line 5"}
    assert report["models"]["m"]["fake"]["value"]["ttft"] == 1.0


def test_info_as_tables_has_the_same(slimproc, here):
    (here / "slimproc.yaml").write_text("log_json: true\nmodels: {m: {backend: fake, aliases: ['[bold]']}}\n")
    result = slimproc("info")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["log_json", "true", "slimproc.yaml", "line", "1"] in rows
    assert ["listen", "127.0.0.1:8000", "default"] in rows
    assert ["aliases", "[bold]", "slimproc.yaml", "line", "2"] in rows
    assert ["slimproc", __version__] in rows


def test_info_with_a_wrong_configuration_still_shows_the_machine(slimproc, here):
    (here / "slimproc.yaml").write_text("listn: 1\nmodels: {m: {backend: fake}}\n")
    result = slimproc("info")
    assert result.status == 78
    assert "slimproc.yaml:1: listn: unknown setting" in result.out
    assert "memory_bytes" in result.out
    report = json.loads(slimproc("info", "--json").out)
    assert report["problems"] == ["slimproc.yaml:1: listn: unknown setting; did you mean listen?"]


def test_version_help_and_nothing_at_all(slimproc):
    assert slimproc("--version").out == f"slimproc {__version__}\n"
    for arguments in (["--help"], ["-h"], []):
        out = slimproc(*arguments).out
        assert all(command in out for command in ("serve", "check-config", "info", "ps", "import"))
    assert "--admin-socket" in slimproc("serve", "--help").out
    assert slimproc("nosuch").status == 2
