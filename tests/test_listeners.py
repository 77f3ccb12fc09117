"""Which sockets a server listens on: its own, or those that systemd has opened for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from slimproc.config import Config, Listen, load_config
from slimproc.errors import EX_CONFIG, ConfigError
from slimproc.listeners import Listeners
from tests.serving import LIMIT, fake, wait_until

_EXEC = "import os, sys; os.environ['LISTEN_PID'] = str(os.getpid()); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(fake() | {"admin_socket": str(tmp_path / "admin.sock"), "listen": "127.0.0.1:0"}))
    return load_config(file, flags={}, environ={"HOME": str(tmp_path)}, dotenv=None)


@pytest.fixture
def public() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "passed.sock"))
        sock.listen()
        yield sock


# --- our own ----------------------------------------------------------------------------------------------------------------


def test_what_a_dead_server_left_is_replaced(config):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(config.admin_socket))
    with Listeners(config) as listeners, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(listeners.admin_path))
    assert not config.admin_socket.exists()


def test_a_file_in_the_place_of_the_admin_socket_is_left_as_it_is(config):
    config.admin_socket.write_text("precious")
    with pytest.raises(
        OSError, match=r"cannot make the admin socket .*admin.sock: it is there already, and is no socket"
    ):
        Listeners(config)
    assert config.admin_socket.read_text() == "precious"


def test_whatever_keeps_the_admin_socket_from_being_made_names_it(config, admin):
    with pytest.raises(OSError, match=r"admin socket .*passed.sock: another server uses it"):
        Listeners(replace(config, admin_socket=Path(admin.getsockname())))
    for place, reason in (
        ("", "it is there already, and is no socket"),
        ("none/x", "No such file or directory"),
        ("c.yaml/x", "Not a directory"),
        ("a" * 200, "AF_UNIX path too long"),
    ):
        path = config.admin_socket.parent / place
        with pytest.raises(OSError, match=f"cannot make the admin socket {path}: {reason}"):
            Listeners(replace(config, admin_socket=path))


def test_a_host_that_nobody_knows_is_told_in_the_systems_words(config):
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.invalid:0: (?!Unknown error)\w+"):
        Listeners(replace(config, listen=Listen("no.such.invalid", 0)))


def test_a_port_that_is_taken_is_told_with_the_way_out(config, public):
    host, port = public.getsockname()
    with pytest.raises(
        OSError, match=rf"^\[Errno \d+\] cannot listen on {host}:{port}: .* \(--port takes another one\)$"
    ):
        Listeners(replace(config, listen=Listen(host, port)))


# --- systemd's --------------------------------------------------------------------------------------------------------------


def test_a_passed_socket_is_the_public_one_whatever_it_is_called(config, public):
    with Listeners(config, {"anything": public}) as listeners:
        assert listeners.public is public
        assert listeners.port == public.getsockname()[1]
        assert listeners.url == f"http://127.0.0.1:{listeners.port}"
        assert listeners.admin_path == config.admin_socket
    assert not listeners.admin_path.exists()


def test_a_passed_admin_socket_is_known_by_its_name_and_its_file_stays(config, admin):
    with Listeners(config, {"admin": admin}) as listeners:
        assert listeners.admin is admin
        assert listeners.port != 0, "the public one is our own"
    assert listeners.admin_path.name == "passed.sock"
    assert listeners.admin_path.exists(), "it is systemd's"


def test_an_ipv6_socket_gives_an_address_that_a_client_can_use(config):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as sock, Listeners(config, {"x": sock}) as listeners:
        assert listeners.url == f"http://[::1]:{listeners.port}"


def test_a_socket_on_all_interfaces_is_found_on_this_one(config):
    with socket.create_server(("", 0)) as sock, Listeners(config, {"x": sock}) as listeners:
        assert listeners.url == f"http://127.0.0.1:{listeners.port}"


def test_sockets_that_do_not_fit_are_a_wrong_configuration(config, public, admin):
    for passed, words in (
        ({"a": public, "b": public}, "several public sockets (a, b)"),
        ({"http": admin}, "'http' that systemd passed is no TCP socket"),
        ({"admin": public}, "no unix socket"),
    ):
        with pytest.raises(ConfigError) as caught:
            Listeners(config, passed)
        assert words in caught.value.message


# --- a whole server ---------------------------------------------------------------------------------------------------


def serve(directory: Path, *sockets: socket.socket, names: str) -> subprocess.Popen[bytes]:
    """A server that systemd would have started with these sockets."""

    def place() -> None:
        moved = [os.dup2(os.dup(sock.fileno()), 60 + number) for number, sock in enumerate(sockets)]
        for number, fd in enumerate(moved):
            os.dup2(fd, 3 + number, inheritable=True)

    file = directory / "slimproc.yaml"
    file.write_text(yaml.safe_dump(fake() | {"admin_socket": str(directory / "own.sock"), "listen": "127.0.0.1:1"}))
    environ = dict(os.environ) | {"LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names}
    command = [sys.executable, "-c", _EXEC, "-m", "slimproc", "serve", "--config", str(file)]
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=environ,
            preexec_fn=place,  # noqa: PLW1509  # numbers 3 and 4 are what it is about, and only the child may use them
            close_fds=False,
            stdout=log,
            stderr=log,
            cwd=directory,
        )


def ask(sock: socket.socket, path: str) -> Any:
    with socket.socket(sock.family) as client:
        client.settimeout(LIMIT)
        client.connect(sock.getsockname())
        connection = http.client.HTTPConnection("x")
        connection.sock = client
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_client_that_comes_before_the_server_or_between_two_of_them_is_answered(tmp_path, public, admin):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        with socket.create_connection(public.getsockname(), timeout=LIMIT) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            server = serve(tmp_path, public, admin, names="http:admin")
            try:
                assert early.recv(4096).startswith(b"HTTP/1.1 200 ")
                wait_until(lambda: ask(public, "/readyz")["status"] == "ready", "its model is ready")
                assert ask(admin, "/admin/replicas")["replicas"][0]["state"] == "ready"
                assert not (tmp_path / "own.sock").exists()
            finally:
                server.send_signal(number)
                assert server.wait(LIMIT) in (0, -signal.SIGKILL)
    assert Path(admin.getsockname()).exists()


def test_a_server_that_is_passed_nonsense_says_so_and_is_not_to_be_started_again(tmp_path, public):
    server = serve(tmp_path, public, public, names="a:b")
    assert server.wait(LIMIT) == EX_CONFIG
    assert "systemd passed several public sockets (a, b)" in (tmp_path / "log").read_text()
