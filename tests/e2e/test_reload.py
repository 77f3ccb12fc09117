"""SIGHUP: the configuration is read again, what is warm stays warm, and nobody's request fails for it."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.serving import ServerProcess, script, wait_until

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

MIB = 1 << 20


class Reloading:
    """A server whose file the test writes again."""

    def __init__(self, directory, config):
        self.directory = directory
        self.server = ServerProcess(directory, {"log_json": True} | config)
        self.file = directory / "slimproc.yaml"
        self.base = yaml.safe_load(self.file.read_text())
        self.reloads = 0

    def write(self, **changes):
        self.file.write_text(yaml.safe_dump(self.base | changes, sort_keys=False))

    def hang_up(self):
        self.server.process.send_signal(signal.SIGHUP)

    def reload(self, **changes):
        """Write the file, ask, and wait until it is in force."""
        before = len(self.server.records("reloaded"))
        self.write(**changes)
        self.hang_up()
        wait_until(lambda: len(self.server.records("reloaded")) > before, f"reloaded; its log: {self.server.log}")
        return self.server.records("reloaded")[-1]

    def pids(self):
        """Of the engines, by model."""
        found = {}
        for replica in self.server.replicas():
            found.setdefault(replica["model"], []).append(replica["pid"])
        return found

    def wait_settled(self, **counts):
        """Until each of these models has so many replicas, all ready, and there are no others."""

        def settled():
            replicas = self.server.replicas()
            found = {name: [one for one in replicas if one["model"] == name] for name in counts}
            right = all(len(found[name]) == count for name, count in counts.items())
            return right and len(replicas) == sum(counts.values()) and all(o["state"] == "ready" for o in replicas)

        wait_until(settled, f"{counts} are ready and nothing else is there; its log: {self.server.log}")

    def stray_engines(self):
        """Engine processes that are not in the table."""
        known = {replica["pid"] for replica in self.server.replicas()}
        strays = []
        for child in self.server.children():
            try:
                if "slimproc.engines" in " ".join(child.cmdline()) and child.pid not in known:
                    strays.append(child.pid)
            except psutil.NoSuchProcess:
                continue
        return strays

    def ask(self, model, prompt="hi", **fields):
        return self.server.post("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 3} | fields)


@pytest.fixture
def serve(tmp_path):
    started = []

    def start(**config):
        started.append(Reloading(tmp_path / str(len(started)), config))
        return started[-1]

    yield start
    for each in started:
        each.server.close()


def model(**settings):
    block = {
        key: settings.pop(key) for key in ("load_time", "token_latency", "bytes", "unload_time") if key in settings
    }
    return {"backend": "fake", "fake": block, **settings}


class Load:
    """Clients that ask some models again and again, streamed and joined."""

    def __init__(self, server, models):
        self.server = server
        self.failures = []
        self.answered = dict.fromkeys(models, 0)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(name, stream)) for name in models for stream in (True, False)
        ]

    def _ask(self, name, stream):
        body = {"model": name, "prompt": script(token_latency=0.005), "max_tokens": 10, "stream": stream}
        while not self._over.is_set():
            answer = self.server.post("/v1/completions", body)
            text = answer.body.decode()
            if answer.status != 200 or '"error"' in text or (stream and not text.endswith("data: [DONE]\n\n")):
                self.failures.append((name, answer.status, text))
                return
            self.answered[name] += 1

    def wait_more(self, count=2):
        """Until each model has answered so many more."""
        before = dict(self.answered)
        wait_until(
            lambda: self.failures or all(self.answered[name] >= before[name] + count for name in before),
            "every model answers",
        )

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()


# --- what changes, and what does not ----------------------------------------------------------------------------------


def test_under_load_models_come_go_and_are_replaced_and_no_request_fails(serve):
    models = {name: model(token_latency=0.005) for name in ("same", "other", "gone")}
    reloading = serve(models=models)
    server = reloading.server.wait_ready()
    before = reloading.pids()
    last = server.stream(script(token_latency=0.02), model="gone", max_tokens=60)
    last.take(1)
    with Load(server, ["same", "other"]) as load:
        load.wait_more()
        told = reloading.reload(
            models={"same": models["same"], "other": models["other"] | {"slots": 2}, "new": model()}
        )
        assert (told["added"], told["removed"], told["replaced"]) == ("new", "gone", "other")
        assert reloading.ask("gone").status == 404
        load.wait_more()
        reloading.wait_settled(same=1, other=1, new=1)
        load.wait_more()
    assert load.failures == []
    events = list(last.events())
    assert events[-1] == "[DONE]"
    assert not any("error" in event for event in events[:-1])
    after = reloading.pids()
    assert after["same"] == before["same"]
    assert after["other"] != before["other"]
    assert reloading.ask("new").status == 200


def test_the_running_stream_of_a_removed_model_keeps_it_and_then_it_is_gone(serve):
    reloading = serve(models={"a": model(), "b": model(token_latency=0.05)})
    server = reloading.server.wait_ready()
    pid = reloading.pids()["b"][0]
    stream = server.stream(script(token_latency=0.03), model="b", max_tokens=40)
    stream.take(1)
    reloading.reload(models={"a": model()})
    assert reloading.ask("b").status == 404
    assert [one["id"] for one in server.get("/v1/models").json["data"]] == ["a"]
    assert list(stream.events())[-1] == "[DONE]"
    reloading.wait_settled(a=1)
    wait_until(lambda: not psutil.pid_exists(pid), "its engine is gone")
    wait_until(
        lambda: 'slimproc_replicas{model="b"' not in server.get("/metrics").body.decode(), "no gauge of it is left"
    )
    assert server.metric("requests_total", model="b", outcome="ok") == 1


def test_what_needs_no_new_engine_changes_in_place(serve):
    reloading = serve(models={"a": model(), "b": model()})
    server = reloading.server.wait_ready()
    before = reloading.pids()
    told = reloading.reload(
        models={"a": model(aliases=["nick"], unlisted=True, max_tokens_limit=20), "b": model()}, default_model="b"
    )
    assert (told["changed"], told["settings"]) == ("a", "default_model")
    assert reloading.pids() == before
    assert reloading.ask("nick").status == 200
    assert [one["id"] for one in server.get("/v1/models").json["data"]] == ["b"]
    assert server.complete("hi").json["model"] == "b"


def test_another_chat_template_in_the_same_file_is_used_from_then_on(serve, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("first\n{{ messages[0].content }}")
    reloading = serve(models={"a": model(chat_template=str(template))})
    server = reloading.server.wait_ready()

    def answer():
        return server.chat(script(echo=True), max_tokens=100).text

    assert answer().startswith("first")
    template.write_text("and now something else\n{{ messages[0].content }}")
    assert reloading.reload()["changed"] == "a"
    assert answer().startswith("and now something else")


def test_what_needs_a_restart_is_said_and_stays(serve):
    reloading = serve(models={"a": model()})
    reloading.server.wait_ready()
    reloading.reload(listen="127.0.0.1:1", ring_size="2MiB", models={"a": model()})
    told = [line["setting"] for line in reloading.server.records("a changed setting needs a restart")]
    assert told == ["listen", "ring_size"]
    assert reloading.ask("a").status == 200


def test_the_log_level_applies_at_once(serve):
    reloading = serve(models={"a": model()})
    server = reloading.server.wait_ready()
    reloading.write(models={"a": model()}, log_level="warning")
    reloading.hang_up()

    def quiet():
        before = server.log
        return reloading.ask("a").status == 200 and server.log == before

    wait_until(quiet, "requests leave no line any more")


# --- a wrong file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [("models: {a: {backend: fake}\n  : [", "slimproc.yaml:2"), ("models:\n  a:\n    backend: nonsense\n", ":3")],
)
def test_a_wrong_file_changes_nothing_and_its_line_is_named(serve, text, said):
    reloading = serve(models={"a": model()})
    server = reloading.server.wait_ready()
    before = reloading.pids()
    message = "the configuration is wrong, and the old one stays in force"
    reloading.file.write_text(text)
    reloading.hang_up()
    wait_until(lambda: server.records(message), "it is told")
    assert any(said in line["problem"] and line["level"] == "error" for line in server.records(message))
    assert reloading.ask("a").status == 200
    assert reloading.pids() == before
    reloading.reload(models={"a": model(), "b": model()})
    assert reloading.ask("b").status == 200


def test_a_file_that_is_gone_changes_nothing(serve):
    reloading = serve(models={"a": model()})
    server = reloading.server.wait_ready()
    reloading.file.unlink()
    reloading.hang_up()
    wait_until(lambda: server.records("the configuration is wrong, and the old one stays in force"), "it is told")
    assert reloading.ask("a").status == 200


def test_a_peak_that_no_device_can_hold_is_refused_as_at_the_start(serve):
    reloading = serve(models={"a": model()}, memory={"margin": 0, "host_limit": 1000 * MIB})
    server = reloading.server.wait_ready()
    big = model(memory={"load_peak": "2GiB", "inference_peak": "2GiB"})
    reloading.write(models={"a": model(), "b": big})
    reloading.hang_up()
    message = "the configuration is wrong, and the old one stays in force"
    wait_until(lambda: server.records(message), "it is refused once the devices are known")
    assert "models.b.memory.load_peak" in server.records(message)[0]["problem"]
    assert reloading.ask("b").status == 404
    reloading.reload(models={"a": model()})
    assert reloading.ask("b").status == 404


# --- in quick succession, and at odd moments --------------------------------------------------------------------------


def test_ten_in_a_second_leave_one_engine_a_replica_and_no_other_process(serve):
    reloading = serve(models={"a": model(), "b": model(replicas=2)})
    reloading.server.wait_ready()
    for slots in range(1, 11):
        reloading.write(models={"a": model(), "b": model(replicas=2, slots=slots), "c": model(slots=slots)})
        reloading.hang_up()
    wait_until(
        lambda: {one["slots"] for one in reloading.server.replicas() if one["model"] == "c"} == {10},
        "the last one holds",
    )
    reloading.wait_settled(a=1, b=2, c=1)
    assert {one["slots"] for one in reloading.server.replicas() if one["model"] != "a"} == {10}
    wait_until(lambda: not reloading.stray_engines(), "no engine that is not in the table")


def test_twenty_reloads_leave_no_descriptor_thread_or_process_behind(serve):
    reloading = serve(models={"a": model(), "b": model()})
    reloading.server.wait_ready()
    process = psutil.Process(reloading.server.process.pid)

    def toggle(count):
        for number in range(count):
            reloading.reload(models={"a": model(), "b" if number % 2 else "c": model(slots=1 + number % 3)})
            assert reloading.ask("a").status == 200
        reloading.wait_settled(a=1, b=1)

    toggle(4)  # threads and imports that are made once
    before = process.num_fds(), len(reloading.server.children())
    toggle(20)
    wait_until(lambda: (process.num_fds(), len(reloading.server.children())) <= before, f"no more than {before}")


def test_a_model_that_is_replaced_while_it_loads_is_loaded_as_it_is_now(serve):
    reloading = serve(models={"a": model(load_time=3)})
    server = reloading.server
    pending = server.begin("hi", model="a", max_tokens=3)
    server.wait_queued(1, "a")
    reloading.reload(models={"a": model(load_time=0.1, slots=2)})
    assert pending.answer().status == 200
    reloading.wait_settled(a=1)
    assert server.replica()["slots"] == 2


def test_a_removed_model_that_comes_back_before_it_has_gone_answers_whoever_waits(serve):
    reloading = serve(models={"a": model(), "b": model(token_latency=0.02, slots=1)})
    server = reloading.server.wait_ready()
    stream = server.stream(script(token_latency=0.03), model="b", max_tokens=60)
    stream.take(1)
    waiting = server.begin("hi", model="b", max_tokens=3)
    server.wait_queued(1, "b")
    reloading.reload(models={"a": model()})
    reloading.reload(models={"a": model(), "b": model(slots=3)})
    assert waiting.answer().status == 200
    assert list(stream.events())[-1] == "[DONE]"
    reloading.wait_settled(a=1, b=1)


def test_where_old_and_new_do_not_fit_together_the_old_one_drains_first_and_requests_wait(serve):
    big = {"bytes": 700 * MIB}
    reloading = serve(models={"a": model(**big)}, memory={"margin": 0, "host_limit": 1000 * MIB})
    server = reloading.server.wait_ready()
    stream = server.stream(script(token_latency=0.02), model="a", max_tokens=30)
    stream.take(1)
    reloading.reload(models={"a": model(slots=2, **big)}, memory={"margin": 0, "host_limit": 1000 * MIB})
    pending = server.begin("hi", model="a", max_tokens=3)
    assert list(stream.events())[-1] == "[DONE]"
    assert pending.answer().status == 200
    reloading.wait_settled(a=1)


def test_a_model_that_drains_for_another_may_be_replaced_meanwhile(serve):
    memory = {"margin": 0, "host_limit": 1000 * MIB}
    big = {"bytes": 700 * MIB}
    models = {"a": model(token_latency=0.02, **big), "b": model(**big)}
    reloading = serve(models=models, memory=memory, preload=["a"])
    server = reloading.server.wait_ready()
    stream = server.stream(script(token_latency=0.03), model="a", max_tokens=60)
    stream.take(1)
    pending = server.begin("hi", model="b", max_tokens=3)
    wait_until(lambda: any(one["state"] == "draining" for one in server.replicas()), "a drains for b")
    reloading.reload(models=models | {"a": model(slots=2, **big)}, memory=memory, preload=["a"])
    assert list(stream.events())[-1] == "[DONE]"
    assert pending.answer().status == 200
    assert reloading.ask("a").status == 200


def test_during_a_shutdown_it_is_ignored(serve):
    reloading = serve(models={"a": model(token_latency=0.02)})
    server = reloading.server.wait_ready()
    stream = server.stream(script(token_latency=0.03), model="a", max_tokens=50)
    stream.take(1)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.records("stopping"), "it stops")
    for _ in range(3):
        reloading.hang_up()
    assert list(stream.events())[-1] == "[DONE]"
    assert server.process.wait(30) == 0
    assert not server.records("reloading")


def test_a_reload_that_is_running_when_the_server_stops_does_not_keep_it(serve):
    reloading = serve(models={"a": model(), "b": model()})
    server = reloading.server.wait_ready()
    for number in range(5):
        reloading.write(models={"a": model(slots=number + 1), "c": model()})
        reloading.hang_up()
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_before_it_serves_it_waits_and_then_reads_again(tmp_path):
    """Signals from the first moment on that Python runs our code; before that the process has no handler for anything."""
    config = {"log_json": True, "models": {"a": model()}}
    server = None
    started = threading.Event()

    def nag(pid):
        while not started.is_set():
            os.kill(pid, signal.SIGHUP)
            time.sleep(0.005)

    class Nagged(ServerProcess):
        def _port(self):
            if not hasattr(self, "nagger") and _blocks_hangups(self.process.pid):
                self.nagger = threading.Thread(target=nag, args=(self.process.pid,))
                self.nagger.start()
            return super()._port()

    try:
        server = Nagged(tmp_path / "nagged", config)
        started.set()
        wait_until(lambda: server.records("reloaded"), "it read again")
        server.wait_ready()
        assert server.complete("hi", max_tokens=3).status == 200
        assert len(server.replicas()) == 1
    finally:
        started.set()
        if server is not None:
            server.close()


def _blocks_hangups(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return bool((int(masks["SigBlk"], 16) | int(masks["SigCgt"], 16)) & 1)


def test_metrics_stay_readable_through_reloads(serve):
    reloading = serve(models={"a": model()})
    server = reloading.server.wait_ready()
    reloading.ask("a")
    reloading.reload(models={"b": model()})
    reloading.wait_settled(b=1)
    reloading.reload(models={"a": model(), "b": model()})
    reloading.wait_settled(a=1, b=1)
    assert server.metric("requests_total", model="a", outcome="ok") == 1
    assert json.loads(json.dumps(server.admin("/admin/models")))["models"]
