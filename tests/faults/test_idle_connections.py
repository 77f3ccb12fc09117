"""Connections on which nothing whole comes: each is given up after a while, and those that are served are not."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.faults.leftovers import Leftovers
from tests.serving import fake, script, wait_until

pytestmark = pytest.mark.slow

SHORT = """
import sys
if "serve" in sys.orig_argv:
    from slimproc.http import app
    assert app.KEEPALIVE_TIMEOUT > 10
    app.KEEPALIVE_TIMEOUT = 1.0
"""
"""It is no setting, and a minute would be long to wait."""
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: "


def closed(sock):
    """The server has hung up, and has said nothing that the test has not read."""
    sock.settimeout(0.01)
    try:
        return sock.recv(4096) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def drip(sock, over):
    """A byte of a head now and then, for ever."""
    while not over.wait(0.05):
        try:
            sock.send(b"a")
        except OSError:
            return


@pytest.mark.parametrize("sent", ["nothing", "half a head", "a head that drips", "a whole request before"])
def test_a_connection_without_a_whole_head_is_closed_in_time_and_a_stream_beside_it_is_not(serve, tmp_path, sent):
    (tmp_path / "sitecustomize.py").write_text(SHORT)
    server = serve(fake(context=1_000_000), PYTHONPATH=str(tmp_path))
    assert "sitecustomize" not in server.log
    leftovers = Leftovers(server)
    over = threading.Event()
    with server.stream(script(token_latency=0.02), max_tokens=900_000) as stream:
        stream.take(1)
        sock = socket.create_connection(("127.0.0.1", server.port))
        dripping = threading.Thread(target=drip, args=(sock, over))
        if sent == "a whole request before":
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in sock.recv(4096)
        elif sent != "nothing":
            sock.sendall(HALF)
        if "drips" in sent:
            dripping.start()
        try:
            wait_until(lambda: closed(sock), "the server has given it up")
        finally:
            over.set()
            if dripping.ident:
                dripping.join()
            sock.close()
        assert len(stream.take(60)) == 60, "which takes longer than anybody may be idle"
    leftovers.assert_none()
