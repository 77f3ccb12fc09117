"""``slimproc bench`` as its users call it: what it prints and writes, and with which status it ends."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from slimproc import cli
from slimproc.bench import drive as drive_module
from slimproc.bench.rows import FIELDS
from slimproc.cli.app import app
from tests.bench.conftest import Client, Scripted, chunk, event, head, said, usage
from tests.serving import ServerProcess, fake, wait_until

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slimproc", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


async def answers(client: Client, body: dict) -> None:
    """Chats and completions alike."""
    text = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
    more = [{"choices": [text]} for _ in range(body["max_tokens"])]
    await client.stream(*more, {"choices": [{"finish_reason": "length"}]}, usage(body["max_tokens"], 20, 4))


async def endless(client: Client, _body: dict) -> None:
    await client.send(head())
    while True:
        await client.send(chunk(event(said("x"))))
        await asyncio.sleep(0.005)


# --- with a server ------------------------------------------------------------------------------------------------------


def test_a_table_says_how_many_how_fast_and_how_long(bench: Run) -> None:
    with Scripted(answers).in_thread() as server:
        status, out, err = bench(server.url, "--streams", 2, "--requests", 6, "--max-tokens", 5, "--slo-ttft", 10_000)
    assert (status, err) == (0, "")
    assert "6 ok" in out
    assert "30 tokens" in out
    assert "6 kept every limit" in out
    assert "120, 24 of them from cache" in out
    assert "time to first token" in out
    assert {body["model"] for body in server.requests} == {"m"}
    assert all("messages" in body for body in server.requests)


def test_json_has_the_plan_the_summary_and_a_row_for_each_request(bench: Run, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv")
    limits = ("--slo-ttft", 500, "--slo-itl", 20)
    with Scripted(answers).in_thread() as server:
        assert bench(server.url, "--completions", "--requests", 5, "--field", "temperature=0", *limits, *files)[0] == 0
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["plan"]["fields"] == {"temperature": 0}
    assert (document["plan"]["slo_ttft"], document["plan"]["slo_itl"]) == (0.5, 0.02)
    assert document["servers"] == [{"url": server.url, "model": "m"}]
    assert document["summary"][0]["ok"] == len(document["requests"]) == 5
    assert document["summary"][0]["ttft"]["count"] == 5
    with (tmp_path / "b.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == ["ok"] * 5
    assert {row["tokens"] for row in rows} == {"64"}
    assert all(float(row["ttft"]) <= float(row["latency"]) for row in rows)


def test_a_dash_writes_to_stdout_and_nothing_else_is_there(bench: Run) -> None:
    with Scripted(answers).in_thread() as server:
        status, out, _ = bench(server.url, "--requests", 2, "--json", "-")
    assert status == 0
    assert json.loads(out)["summary"][0]["ok"] == 2


def test_a_key_goes_to_its_own_server_and_the_model_is_named(bench: Run) -> None:
    with Scripted(answers, ("a", "b")).in_thread() as one, Scripted(answers).in_thread() as other:
        keys = ("--api-key", "k1", "--peer", other.url, "--peer-api-key", "k2", "--peer-model", "m")
        status, _, err = bench(one.url, "--model", "b", "--requests", 2, "--rounds", 1, *keys)
    assert status == 0, err
    assert {body["model"] for body in one.requests} == {"b"}
    assert all("Bearer k1" in top for top in one.heads)
    assert all("Bearer k2" in top for top in other.heads)


def test_refusals_are_measured_and_no_failure(bench: Run) -> None:
    async def refuse(client: Client, body: dict) -> None:
        if client.number % 2:
            await client.whole({"error": {"message": "full"}}, "503 Service Unavailable")
        else:
            await answers(client, body)

    with Scripted(refuse).in_thread() as server:
        status, out, _ = bench(server.url, "--rate", 500, "--requests", 10)
    assert status == 0
    assert "5 ok, 5 refused" in out
    assert "5 of kind HTTP 503: full" in out
    assert "refused after" in out


def test_failed_requests_are_told_by_kind_and_end_with_status_1(bench: Run) -> None:
    async def page(client: Client, _body: dict) -> None:
        await client.send(head("text/html"), chunk(b"<html>"), b"0\r\n\r\n")

    with Scripted(page).in_thread() as server:
        status, out, err = bench(server.url, "--requests", 3)
    assert status == 1
    assert "3 of kind not SSE: a stream was asked for, and text/html came" in out
    assert err == "slimproc bench: 3 requests failed\n"


def test_a_peer_meets_the_same_prompts_in_turns_and_ratios_have_their_spread(bench: Run, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    with Scripted(answers).in_thread() as one, Scripted(answers).in_thread() as other:
        asked = ("--requests", 4, "--streams", 1, "--rounds", 3, "--json", file)
        status, out, err = bench(one.url, "--peer", other.url, *asked)
    assert (status, err) == (0, "")
    assert one.requests == other.requests
    assert len({str(body["messages"]) for body in one.requests}) == 12
    assert "3 rounds; a ratio above 1" in out
    document = json.loads(file.read_text())
    assert [turn["server"] for turn in document["rounds"]] == [
        server.url for server in (one, other, other, one, one, other)
    ]
    ratio = next(row for row in document["comparisons"] if row["measure"] == "tokens/s")
    assert ratio["ratios"] == pytest.approx([a / b for a, b in zip(ratio["first"], ratio["second"], strict=True)])
    assert len(ratio["ratios"]) == 3


def test_a_peer_that_dies_in_mid_run_is_named_and_what_was_measured_is_kept(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_module, "PATIENCE", 0.2)
    command = [sys.executable, "-c", PEER]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    try:
        assert peer.stdout is not None
        url = f"http://127.0.0.1:{peer.stdout.readline().strip()}"
        with Scripted(answers).in_thread() as server:
            file = tmp_path / "b.json"
            asked = ("--requests", 50, "--streams", 1, "--rounds", 2, "--json", file)
            status, out, err = bench(server.url, "--peer", url, *asked)
    finally:
        peer.kill()
        peer.wait()
        peer.stdout.close()
    assert status == 1
    assert f"{url} went away: connection refused" in err
    assert "50 ok" in out
    document = json.loads(file.read_text())
    assert [turn["summary"]["ok"] for turn in document["rounds"]] == [50, 7]
    assert document["gone"].startswith(url)


PEER = """
import asyncio, os
from tests.bench.conftest import Scripted
from tests.bench.test_bench_command import answers

async def dies(client, body):
    if client.number == 7:
        os._exit(1)
    await answers(client, body)

async def main():
    scripted = Scripted(dies)
    server = await scripted.start()
    print(scripted.port, flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.parametrize("route", ["--chat", "--completions"])
def test_slimproc_itself_is_measured_to_the_last_token(bench: Run, tmp_path: Path, route: str) -> None:
    file = tmp_path / "b.json"
    with ServerProcess(tmp_path / "server", fake(slots=4, context=4096)) as server:
        server.wait_ready()
        status, _, err = bench(server.url, route, "--streams", 4, "--requests", 12, "--max-tokens", 20, "--json", file)
        generated = server.metric("generated_tokens_total", model="fake")
    assert status == 0, err
    summary = json.loads(file.read_text())["summary"][0]
    assert (summary["ok"], summary["tokens"], summary["tokens_by"]) == (12, generated, "usage")
    assert summary["itl"]["count"] == generated - 12


def test_clients_that_leave_are_cancelled_in_slimproc(bench: Run, tmp_path: Path) -> None:
    config = fake(slots=8, context=100_000, token_latency=0.002)
    with ServerProcess(tmp_path / "server", config) as server:
        server.wait_ready()
        asked = ("--requests", 8, "--max-tokens", 200, "--cancel", 1, "--field", "ignore_eos=true")
        status, out, _ = bench(server.url, *asked)
        assert status == 0
        assert "8 left" in out
        server.wait_metric(8, "requests_total", outcome="cancelled")


# --- without one, and with nonsense -----------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_status_1_in_one_line(bench: Run) -> None:
    status, out, err = bench("http://127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err == "slimproc bench: no server answers at http://127.0.0.1:1: connection refused\n"


def test_a_peer_that_is_not_there_is_status_1_in_one_line_before_anything_is_measured(bench: Run) -> None:
    with Scripted(answers).in_thread() as server:
        status, out, err = bench(server.url, "--peer", "http://127.0.0.1:1", "--model", "m")
    assert (status, out) == (1, "")
    assert err == "slimproc bench: no server answers at http://127.0.0.1:1: connection refused\n"
    assert server.requests == []


def test_what_speaks_no_http_is_status_1_in_one_line(bench: Run) -> None:
    async def shout(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        writer.close()

    scripted = Scripted(answers)
    scripted._serve = shout
    with scripted.in_thread():
        status, out, err = bench(scripted.url)
    assert (status, out) == (1, "")
    assert "no HTTP/1.1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rate", "x"), "--rate: a number, not 'x'"),
        (("--streams", "1.5"), "--streams: a whole number, not '1.5'"),
        (("--streams", "0"), "--streams"),
        (("--streams", "2", "--rate", "3"), "--rate"),
        (("--cancel", "2"), "--cancel"),
        (("--no-stream", "--cancel", "0.5"), "--cancel"),
        (("--rounds", "0"), "--rounds"),
        (("--peer-model", "x"), "--peer"),
        (("--peer", "nonsense"), "nonsense"),
        (("--field", "x"), "--field"),
        (("--api-key", "a b"), "--api-key"),
        (("--json", "/nowhere/at/all"), "--json: /nowhere/at/all: No such file or directory"),
        (("--csv", "/"), "--csv: /: Is a directory"),
        (("ftp://x",), "ftp://x"),
    ],
)
def test_nonsense_is_one_clear_line_and_status_2(bench: Run, arguments: tuple[str, ...], named: str) -> None:
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


def test_several_models_want_one_to_be_named(bench: Run) -> None:
    with Scripted(answers, ("a", "b")).in_thread() as server:
        status, _, err = bench(server.url)
    assert status == 2
    assert "--model which (a, b)" in err


def test_a_file_that_cannot_be_written_is_one_line_and_status_1(bench: Run) -> None:
    with Scripted(answers).in_thread() as server:
        status, out, err = bench(server.url, "--requests", 1, "--json", "/dev/full")
    assert status == 1
    assert "1 ok" in out
    assert err == "slimproc bench: what was measured cannot be written: [Errno 28] No space left on device\n"


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text()


def test_the_page_names_every_option_and_no_other() -> None:
    found = get_command(app).commands["bench"].params  # type: ignore[attr-defined]
    real = {switch for one in found for switch in (*one.opts, *one.secondary_opts) if switch.startswith("--")}
    written = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    unsaid = {"--chat", "--stream", "--usage", "--api-key", "--timeout", "--peer-model", "--peer-api-key", "--help"}
    assert written <= real
    assert real - written <= unsaid


def test_the_page_lists_the_columns_of_a_row() -> None:
    listed = re.search(r"`(server, round,[^`]*)`", PAGE)
    assert listed
    assert listed[1].replace("\n", " ").split(", ") == ["server", "round", *FIELDS]


# --- interrupted, and on a terminal -----------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "slimproc", "bench", *map(str, arguments)]


def test_an_interrupt_shows_and_writes_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    with Scripted(answers).in_thread() as server:
        asked = command(server.url, "--duration", 1000, "--streams", 2, "--max-tokens", 3, "--json", file)
        with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
            wait_until(lambda: len(server.requests) > 20, "the benchmark runs")
            ran.send_signal(signal.SIGINT)
            out, err = ran.communicate(timeout=30)
    assert ran.returncode == 130
    assert "interrupted" in err
    assert "tokens/s" in out
    document = json.loads(file.read_text())
    assert document["interrupted"] is True
    assert document["summary"][0]["ok"] >= 18


def test_an_interrupt_does_not_wait_for_answers_that_never_end() -> None:
    with (
        Scripted(endless).in_thread() as server,
        subprocess.Popen(command(server.url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran,
    ):
        wait_until(lambda: server.running == 8, "all streams run")
        ran.send_signal(signal.SIGINT)
        out, _ = ran.communicate(timeout=30)
    assert ran.returncode == 130
    assert "0 ok" in out


def test_a_terminal_gets_a_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with Scripted(answers).in_thread() as server:
        asked = command(server.url, "--requests", 4)
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=theirs, env=environ) as ran:
            os.close(theirs)
            drawn = b""
            with os.fdopen(ours, "rb", buffering=0) as terminal:
                while True:
                    try:
                        drawn += terminal.read(4096)
                    except OSError:  # what a terminal says when its other end is closed
                        break
            out, _ = ran.communicate(timeout=30)
    assert ran.returncode == 0
    assert server.url.encode() in drawn
    assert "━".encode() in drawn
    assert "━".encode() not in out
