"""slimproc serve: options, the configuration it ends with, and how it fails."""

import subprocess
import sys

import pytest

from slimproc.cli import app as typer_app
from slimproc.cli import serve as serve_command
from slimproc.cli.options import OPTIONS, read_plain
from slimproc.config import Listen
from slimproc.config.load import FLAGS
from slimproc.errors import ConfigError, InternalError


def test_serve_runs_what_flags_environment_and_file_say(slimproc, server, here, monkeypatch):
    (here / "slimproc.yaml").write_text("log_level: debug\nmodels: {m: {backend: fake}}\n")
    (here / ".env").write_text("SLIMPROC_LOG_JSON=true\nSLIMPROC_LISTEN=:1\n")
    monkeypatch.setenv("SLIMPROC_LISTEN", ":2")
    assert slimproc("serve", "--port", "3", "--slots=9").status == 0
    (config,) = server.configs
    assert (config.listen, config.log_level, config.log_json) == (Listen(None, 3), "debug", True)
    assert config.models["m"].slots == 9
    assert config.origin("log_level") == "slimproc.yaml line 1"


def test_serve_without_a_file_serves_the_fake_or_a_model(slimproc, server):
    slimproc("serve", "--backend", "fake")
    slimproc("serve", "--model", "some/model.gguf")
    assert [list(config.models) for config in server.configs] == [["fake"], ["model"]]


def test_a_file_can_be_named(slimproc, server, here):
    (here / "x.yaml").write_text("models: {x: {backend: fake}}")
    (here / "slimproc.yaml").write_text("models: {wrong: {}}")
    for spelling in (["--config", "x.yaml"], ["-c", "x.yaml"], ["--config=x.yaml"], ["-cx.yaml"]):
        assert slimproc("serve", *spelling).status == 0
    assert [list(config.models) for config in server.configs] == [["x"]] * 4


def test_what_the_server_reads_again_comes_from_the_same_places(slimproc, server, here):
    file = here / "slimproc.yaml"
    file.write_text("order: fair\nmodels: {m: {backend: fake}}\n")
    assert slimproc("serve", "--slots", "9").status == 0
    file.write_text("order: strict\nmodels: {m: {backend: fake}}\n")
    (here / ".env").write_text("SLIMPROC_LOG_JSON=true\n")
    config = server.read()
    assert (config.order, config.log_json, config.models["m"].slots) == ("strict", True, 9)
    file.unlink()
    with pytest.raises(ConfigError, match=r"slimproc\.yaml"):
        server.read()


def test_a_wrong_configuration_is_told_on_stderr_and_exits_78(slimproc, server, here):
    (here / "slimproc.yaml").write_text("listn: 1\nmodels: {m: {backend: fake, slots: 0}}\n")
    result = slimproc("serve")
    assert (result.status, result.out, server.configs) == (78, "", [])
    assert result.err.splitlines() == [
        "slimproc.yaml:1: listn: unknown setting; did you mean listen?",
        "slimproc.yaml:2: models.m.slots: wanted an integer from 1 to 256, not 0",
    ]


def test_a_wrong_flag_exits_78_and_an_unknown_one_2(slimproc, server):
    result = slimproc("serve", "--backend", "fake", "--threads", "many")
    assert (result.status, result.err) == (78, "flag --threads: wanted an integer from 1 to 1024, not 'many'\n")
    assert slimproc("serve", "--bogus").status == 2
    assert slimproc("serve", "--port").status == 2
    assert slimproc("serve", "extra").status == 2
    assert server.configs == []


@pytest.mark.parametrize(("error", "status"), [(InternalError("no ring"), 1), (ConfigError("bad socket"), 78)])
def test_a_start_that_fails_is_one_line_and_a_status(slimproc, server, error, status):
    def end():
        raise error

    server.end = end
    result = slimproc("serve", "--backend", "fake")
    assert (result.status, result.err) == (status, f"slimproc: {error}\n")


def test_the_servers_status_is_the_process_status(slimproc, server):
    server.end = lambda: 3
    assert slimproc("serve", "--backend", "fake").status == 3


# --- the quick reading of plain options ---------------------------------------------------------------------


def read_by_typer(monkeypatch, arguments):
    seen = []
    monkeypatch.setattr(serve_command, "serve", lambda flags: seen.append(flags) or 0)
    with pytest.raises(SystemExit):
        typer_app.app(["serve", *arguments])
    return {key: value for key, value in seen[0].items() if value is not None}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--port", "1", "--port", "2"],
        ["--log-json"],
        ["--no-log-json"],
        ["--log-json", "--no-log-json", "-c", "f.yaml"],
        ["--host="],
        ["--model=a=b"],
        *([switch, "x"] for option in OPTIONS if option.metavar for switch in option.switches),
        *([f"{switch}=x y"] for option in OPTIONS if option.metavar for switch in option.switches if switch[1] == "-"),
    ],
)
def test_plain_options_read_the_same_with_typer_and_without(monkeypatch, arguments):
    plain = read_plain(arguments)
    assert plain is not None
    assert plain == read_by_typer(monkeypatch, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["-h"],
        ["--bogus", "1"],
        ["x"],
        ["--port"],
        ["--port", "--host"],
        ["-c=x"],
        ["-cx"],
        ["--log-json=true"],
        ["--"],
    ],
)
def test_whatever_is_not_plain_is_left_to_typer(arguments):
    assert read_plain(arguments) is None


def test_every_option_is_a_flag_of_the_configuration():
    assert {option.key for option in OPTIONS} - {"config"} <= FLAGS


def test_a_plain_serve_imports_nothing_that_it_does_not_need(tmp_path):
    """Each of these costs more than reading the whole configuration."""
    script = """
import sys, types
server = types.ModuleType("slimproc.server")
server.run = lambda config, read: print(*sys.modules) or 0
sys.modules["slimproc.server"] = server
sys.argv = ["slimproc", "serve", "--backend", "fake", "--port", "0"]
from slimproc.cli import main
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=True, timeout=60,
        env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(p or "." for p in sys.path)},
    )  # fmt: skip
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert "msgspec" in loaded
    assert loaded.isdisjoint(
        {"typer", "rich", "pydantic", "aiohttp", "asyncio", "yaml", "psutil", "jinja2", "llama_cpp"}
    )


def test_the_module_runs_as_the_script_does():
    ran = subprocess.run(
        [sys.executable, "-m", "slimproc", "--version"],
        capture_output=True, text=True, check=True, timeout=60,
        env={"PYTHONPATH": ":".join(p or "." for p in sys.path)},
    )  # fmt: skip
    assert ran.stdout.startswith("slimproc ")
