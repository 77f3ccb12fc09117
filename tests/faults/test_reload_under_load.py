"""SIGHUP while everybody asks: no request fails, whether the file is good or not."""

from __future__ import annotations

import signal
import socket
import sys
import threading

import pytest
import yaml

from tests.faults.leftovers import Leftovers
from tests.serving import ServerProcess, script, wait_until

pytestmark = pytest.mark.slow


def model():
    return {"backend": "fake", "slots": 2, "fake": {"token_latency": 0.005}}


class Asking:
    """Threads that ask two models again and again, until the end of the block."""

    def __init__(self, server):
        self.answered, self.failures, self._over = 0, [], threading.Event()
        self._server = server
        self._threads = [
            threading.Thread(target=self._ask, args=(model, stream)) for model in "ab" for stream in (True, False)
        ]

    def _ask(self, model, stream):
        prompt = script(tokens=["x"], repeat=10)
        while not self._over.is_set():
            answer = self._server.complete(prompt, model=model, stream=stream, max_tokens=20)
            said = answer.body.decode()
            whole = said.count('"text":"x"') >= 9 and said.endswith("data: [DONE]\n\n") if stream else "x" * 10 in said
            if answer.status != 200 or not whole:
                self.failures.append((model, answer.status, said))
            self.answered += 1

    def wait_more(self):
        before = self.answered
        wait_until(lambda: self.answered >= before + 12, "they are answered")

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_a_wrong_file_and_then_a_right_one_under_load_fail_nobodys_request(serve):
    server = serve({"models": {"a": model(), "b": model()}, "log_json": True})
    leftovers = Leftovers(server)
    file = next(server.log_path.parent.glob("slimproc.yaml"))
    good = yaml.safe_load(file.read_text())
    pids = [one["pid"] for one in server.replicas()]
    hang_up = lambda: server.process.send_signal(signal.SIGHUP)  # noqa: E731
    with Asking(server) as asking:
        asking.wait_more()
        file.write_text("models: {a: {backend: nonsense}}\n")
        hang_up()
        told = "the configuration is wrong, and the old one stays in force"
        wait_until(lambda: server.records(told), "it is told")
        asking.wait_more()
        assert [one["pid"] for one in server.replicas()] == pids, "nothing has changed"

        changed = good | {"models": {"a": good["models"]["a"], "b": good["models"]["b"] | {"slots": 1}}}
        file.write_text(yaml.safe_dump(changed))
        hang_up()
        wait_until(lambda: server.records("reloaded"), "it is in force")
        asking.wait_more()
        wait_until(lambda: {one["model"]: one["slots"] for one in server.replicas()} == {"a": 2, "b": 1}, "replaced")
        server.wait_ready()
        asking.wait_more()
    assert asking.failures == []
    assert server.replica(0)["pid"] == pids[0], "whose settings stayed is the same"
    leftovers.assert_none()


def hear_until_ready(manager):
    """What a service manager is told, line by line, up to the next READY."""
    told = []
    while "READY=1" not in told:
        told += manager.recv(4096).decode().splitlines()
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_service_manager_hears_that_it_reloads_and_then_that_it_is_ready_whatever_the_file_was(tmp_path):
    """Without the second word a ``systemctl reload`` would wait for ever; without the first it would not wait at all."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        config = {"models": {"a": model()}, "log_json": True}
        with ServerProcess(tmp_path / "server", config, NOTIFY_SOCKET=str(tmp_path / "notify")) as server:
            assert "READY=1" in hear_until_ready(manager)
            server.wait_ready()
            file = tmp_path / "server" / "slimproc.yaml"
            for text, said in ((file.read_text() + "\n", "reloaded"), ("models: []\n", "the configuration is wrong")):
                file.write_text(text)
                server.process.send_signal(signal.SIGHUP)
                told = hear_until_ready(manager)
                assert "RELOADING=1" in told
                assert told[told.index("RELOADING=1") + 1].startswith("MONOTONIC_USEC=")
                assert said in server.log
            assert any(line.startswith("STATUS=") and "the last reload was refused" in line for line in told), told
