"""The command line beside and around a running server."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.serving import LIMIT, fake, script


def slimproc(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "slimproc", *map(str, arguments)],
        capture_output=True, text=True, timeout=LIMIT, cwd=cwd, check=False,
    )  # fmt: skip


def write(directory, text):
    file = directory / "slimproc.yaml"
    file.write_text(text)
    return file


def test_ps_shows_the_replicas_of_a_running_server(serve, tmp_path):
    server = serve(fake(replicas=2, slots=3, context=100_000))
    running = server.begin(script(token_latency=0.01), stream=True, max_tokens=90_000)
    server.wait_sequences(1, 0)
    shown = slimproc("ps", "--admin-socket", server.admin_socket, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    for replica in server.replicas():
        assert str(replica["pid"]) in shown.stdout
    assert shown.stdout.count("ready") == 2
    listed = json.loads(slimproc("ps", "--admin-socket", server.admin_socket, "--json", cwd=tmp_path).stdout)
    assert str(server.replica()["pid"]) in json.dumps(listed)
    running.close()


def test_ps_without_a_server_is_one_line_and_a_failure(tmp_path):
    shown = slimproc("ps", "--admin-socket", tmp_path / "none.sock", cwd=tmp_path)
    assert shown.returncode != 0
    assert len(shown.stderr.splitlines()) == 1


def test_info_tells_the_configuration_and_where_it_came_from(tmp_path):
    write(tmp_path, "log_level: debug\nmodels: {m: {backend: fake, slots: 2}}\n")
    shown = slimproc("info", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    told = json.dumps(json.loads(shown.stdout))
    assert "debug" in told
    assert "slimproc.yaml line 1" in told
    assert slimproc("info", cwd=tmp_path).returncode == 0


def test_check_config_names_every_problem_by_line_and_key(tmp_path):
    good = write(tmp_path, "models: {m: {backend: fake}}\n")
    assert slimproc("check-config", good, cwd=tmp_path).returncode == 0
    bad = write(tmp_path, "listn: x\nlog_json: 1\nmodels:\n  m:\n    backend: fake\n    slots: many\n")
    shown = slimproc("check-config", bad, cwd=tmp_path)
    assert shown.returncode == 78
    told = shown.stdout + shown.stderr
    for line, key in ((1, "listn"), (2, "log_json"), (6, "slots")):
        assert re.search(rf":{line}: .*{key}", told), told


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("models: {m: {backend: fake}}\nmodels: {}\n", 2, "models"),
        ("models: {m: {backend: fake, slots: 0}}\n", 1, "slots"),
        ("models: {m: {backend: fake, slots: '4'}}\n", 1, "slots"),
        ("models: {m: {backend: fakee}}\n", 1, "backend"),
        ("models: {m: {backend: fake}}\nrequest_timeout: 5 minutes\n", 2, "request_timeout"),
        ("models: {m: {backend: fake}}\nmax_json_body: 4 parsecs\n", 2, "max_json_body"),
        ("models: {m: {backend: fake}}\ndefault_model: n\n", 2, "default_model"),
        ("models: {m: {backend: fake}\n", 2, ""),
    ],
)
def test_serve_with_a_wrong_configuration_exits_78_and_starts_nothing(tmp_path, text, line, key):
    shown = slimproc("serve", "--config", write(tmp_path, text), cwd=tmp_path)
    assert shown.returncode == 78
    assert f"slimproc.yaml:{line}: " in shown.stderr
    assert key in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_port_in_use_is_one_line_and_exit_1(server, tmp_path):
    shown = slimproc(
        "serve", "--backend", "fake", "--port", server.port, "--admin-socket", tmp_path / "a.sock", cwd=tmp_path
    )
    assert shown.returncode == 1
    (line,) = shown.stderr.splitlines()
    assert f"127.0.0.1:{server.port}" in line
    assert shown.stdout == ""
    assert server.get("/readyz").status == 200


def test_an_admin_socket_in_use_is_one_line_and_exit_1_and_the_other_server_keeps_it(server, tmp_path):
    shown = slimproc("serve", "--backend", "fake", "--port", 0, "--admin-socket", server.admin_socket, cwd=tmp_path)
    assert shown.returncode == 1
    assert len(shown.stderr.splitlines()) == 1
    assert server.replicas()


def test_a_socket_where_none_can_be_is_one_line_and_exit_1(tmp_path):
    nowhere = tmp_path / "missing" / "a.sock"
    shown = slimproc("serve", "--backend", "fake", "--port", 0, "--admin-socket", nowhere, cwd=tmp_path)
    assert shown.returncode == 1
    assert len(shown.stderr.splitlines()) == 1


def test_a_fake_needs_no_file(serve):
    server = serve({"models": {"unused": {"backend": "fake"}}}, arguments=("--slots", "2"))
    assert server.replica()["slots"] == 2
