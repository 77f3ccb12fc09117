"""slimproc ps: which server it asks, what it shows, and one line where there is none."""

import json
import socket
import threading

import pytest

from slimproc.cli.ps import _age

READY = {"model": "smollm2", "replica": 0, "state": "ready", "reason": "", "pid": 41, "sequences": 3, "slots": 4}
READY |= {"tokens": 12345, "restarts": 1, "since": 3725.2, "progress": 1.0, "details": {"confinement": "strict"}}
FAILED = {"model": "b [x]", "replica": 1, "state": "failed", "reason": "no such file [/m.gguf]", "pid": None}
FAILED |= {"sequences": 0, "slots": 1, "tokens": 0, "restarts": 5, "since": 2.0}
LOADING = {"model": "c", "replica": 0, "state": "starting", "progress": 0.42}
BODY = json.dumps({"replicas": [READY, FAILED, LOADING]}).encode()
OTHER = b'{"replicas":[{"model":"other","replica":0,"state":"ready"}]}'


@pytest.fixture
def runtime(here):
    return here.parent / "r" / "slimproc"


def test_ps_shows_a_row_for_each_replica(slimproc, admin, runtime):
    admin(runtime / "admin-8000.sock", BODY)
    result = slimproc("ps")
    assert (result.status, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines() if line.strip()]
    assert " ".join(rows[0]) == "model replica state for pid sequences tokens restarts confined reason"
    assert rows[2] == ["smollm2", "0", "ready", "1h02m", "41", "3/4", "12345", "1", "strict"]
    assert rows[3] == ["b", "[x]", "1", "failed", "2s", "-", "0/1", "0", "5", "-", "no", "such", "file", "[/m.gguf]"]
    assert rows[4] == ["c", "0", "starting", "42%", "-", "-", "0/0", "0", "0", "-"]


def test_ps_as_json_is_what_the_server_said(slimproc, admin, runtime):
    admin(runtime / "admin-8000.sock", BODY)
    assert json.loads(slimproc("ps", "--json").out) == json.loads(BODY)


def test_ps_asks_the_server_of_its_own_configuration_first(slimproc, admin, runtime, here, monkeypatch):
    admin(runtime / "admin-8000.sock", BODY)
    admin(runtime / "admin-9000.sock", OTHER)
    admin(here / "own.sock", b'{"replicas":[{"model":"own","replica":0,"state":"ready"}]}')
    assert "smollm2" in slimproc("ps").out
    assert "other" in slimproc("ps", "--port", "9000").out
    monkeypatch.setenv("SLIMPROC_LISTEN", ":9000")
    assert "other" in slimproc("ps").out
    (here / "slimproc.yaml").write_text("admin_socket: own.sock\nmodels: {m: {backend: fake}}\n")
    assert "own" in slimproc("ps").out
    assert "smollm2" in slimproc("ps", "--admin-socket", str(runtime / "admin-8000.sock")).out


def test_ps_finds_the_only_server_on_another_port(slimproc, admin, runtime):
    runtime.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:  # a file that a killed server left
        dead.bind(str(runtime / "admin-7000.sock"))
    admin(runtime / "admin-9000.sock", OTHER)
    assert "other" in slimproc("ps").out


def test_ps_does_not_guess_between_two_servers(slimproc, admin, runtime):
    admin(runtime / "admin-9000.sock", OTHER)
    admin(runtime / "admin-9001.sock", OTHER)
    result = slimproc("ps")
    assert result.status == 1
    assert "several servers run here" in result.err
    assert "admin-9000.sock" in result.err


def test_ps_without_a_server_is_one_line(slimproc, runtime):
    result = slimproc("ps")
    assert (result.status, result.out) == (1, "")
    assert result.err == f"slimproc: no server answers at {runtime}/admin-8000.sock: No such file or directory\n"
    assert slimproc("ps", "--admin-socket", "/" + "x" * 200).status == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"no JSON", 200, "is no slimproc server"),
        (b'{"replicas": [{"model": 1}]}', 200, "is no slimproc server"),
        (b"[" * 100_000, 200, "is no slimproc server"),
        (BODY, 500, "answers 500 to GET /admin/replicas"),
    ],
)
def test_ps_of_something_else_is_one_line(slimproc, admin, runtime, body, status, message):
    admin(runtime / "admin-8000.sock", body, status)
    result = slimproc("ps")
    assert (result.status, result.out) == (1, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_ps_of_a_socket_that_speaks_no_http_is_one_line(slimproc, runtime):
    runtime.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / "admin-8000.sock"))
        listener.listen()

        def answer():
            for _ in range(2):  # once to see that it is there, once to ask
                with listener.accept()[0] as connection:
                    if connection.recv(10_000):
                        connection.sendall(b"\x00\x01 nonsense\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        result = slimproc("ps")
        thread.join(10)
    assert (result.status, len(result.err.splitlines())) == (1, 1)
    assert "speaks no HTTP" in result.err


def test_ps_with_a_wrong_configuration_says_so_unless_told_where_to_ask(slimproc, admin, runtime, here):
    (here / "slimproc.yaml").write_text("listn: 1\nmodels: {m: {backend: fake}}\n")
    admin(runtime / "admin-8000.sock", BODY)
    assert slimproc("ps").status == 78
    assert slimproc("ps", "--admin-socket", str(runtime / "admin-8000.sock")).status == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (59, "59s"), (60, "1m00s"), (3599, "59m59s"), (3725, "1h02m"), (187_200, "2d04h")],
)
def test_an_age_is_short(seconds, text):
    assert _age(seconds) == text
