"""Bombs, kills, cancellations and crowds: no render harms another."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from renderer_cases import CHATML, CONTROL, SPIN, is_alive, until, user

import slimproc
from slimproc.chat.templates import Renderer, Template
from slimproc.errors import InternalError, InvalidRequest, ShuttingDown

GOOD = Template(CHATML, CONTROL)
ECHO = Template("{{ messages[0].content }}")
COUNT = Template("{% for i in range(messages[0].content | int) %}{% for j in range(99999) %}{% endfor %}{% endfor %}.")
"""As slow as its message says: some milliseconds each."""


def descriptors():
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- their numbers, not paths


def is_there(pid):
    """Also as a zombie."""
    return Path(f"/proc/{pid}").exists()


@contextlib.asynccontextmanager
async def running(**limits):
    renderer = Renderer(**{"time_limit": 10.0, "prepare_limit": 30.0, "start_limit": 60.0, "processes": 1} | limits)
    await renderer.start()
    try:
        yield renderer
    finally:
        await renderer.close()


async def refusal(renderer, template, content="x"):
    with pytest.raises(InvalidRequest) as caught:
        await renderer.render(template, user(content))
    return caught.value.message


def test_a_render_that_takes_too_long_is_cut_off_and_the_next_works(loop):
    async def check():
        async with running(time_limit=1.0) as renderer:
            before = renderer.statistics().pids
            assert await refusal(renderer, Template(SPIN)) == "the chat template took longer than 1000 ms"
            assert (await renderer.render(ECHO, user("next"))).text == "next"
            assert renderer.statistics().pids != before
            assert not any(map(is_alive, before))
            assert renderer.statistics().timed_out == 1

    loop(check())


def test_a_quarter_of_a_second_is_the_limit_unless_told_otherwise(loop):
    async def check():
        renderer = Renderer(processes=1, prepare_limit=30.0, start_limit=60.0)
        await renderer.start()
        assert await refusal(renderer, Template(SPIN)) == "the chat template took longer than 250 ms"
        await renderer.close()

    loop(check())


def test_a_template_that_compiles_too_long_is_cut_off_and_the_next_works(loop):
    async def check():
        async with running(prepare_limit=0.5) as renderer:
            # jinja2 computes constants while it compiles
            message = await refusal(renderer, Template("{{ (9 ** (9 ** 9)) % 7 }}"))
            assert message == "the chat template took longer than 500 ms to compile"
            assert (await renderer.render(ECHO, user("next"))).text == "next"

    loop(check())


@pytest.mark.parametrize(
    ("bomb", "message"),
    [
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ '%10000000000d' % 1 }}", "memory"),
        ("{% set ns = namespace(l=['x']) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}", "memory"),
        ("{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
        ("{% for i in range(99999) %}{{ messages[0].content * 100000 }}{% endfor %}", "longer than 4194304 bytes"),
        ("{{ messages[0].content * 4194305 }}", "longer than 4194304 bytes"),
        ("{{ 'é' * 2097153 }}", "longer than 4194304 bytes"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nest too deeply"),
    ],
)
def test_a_memory_or_output_bomb_is_refused_and_the_next_render_works(loop, bomb, message):
    async def check():
        async with running() as renderer:
            assert message in await refusal(renderer, Template(bomb))
            assert (await renderer.render(ECHO, user("next"))).text == "next"
            assert renderer.statistics().died == 0

    loop(check())


def test_a_text_of_exactly_the_output_limit_is_rendered(loop):
    async def check():
        async with running(output_limit=1000) as renderer:
            assert (await renderer.render(ECHO, user("x" * 1000))).text == "x" * 1000
            assert (await renderer.render(ECHO, user("é" * 500))).text == "é" * 500
            assert "longer than 1000 bytes" in await refusal(renderer, ECHO, "x" * 1001)

    loop(check())


def test_a_child_killed_while_idle_costs_no_render(loop):
    async def check():
        async with running(processes=2) as renderer:
            for pid in renderer.statistics().pids:
                os.kill(pid, signal.SIGKILL)
            texts = [(await renderer.render(ECHO, user(str(number)))).text for number in range(5)]
            assert texts == ["0", "1", "2", "3", "4"]

    loop(check())


def test_a_child_killed_in_a_render_fails_that_render_alone(loop):
    async def check():
        async with running() as renderer:
            spinning = asyncio.create_task(renderer.render(Template(SPIN), user("x")))
            queued = asyncio.create_task(renderer.render(ECHO, user("next")))
            while not spinning.done():
                for pid in renderer.statistics().pids if renderer.statistics().running else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.05)
            with pytest.raises(InternalError, match="died while it rendered"):
                await spinning
            assert (await queued).text == "next"

    loop(check())


def test_a_cancelled_render_leaves_the_next_ones_in_step(loop):
    async def check():
        async with running() as renderer:
            await renderer.render(COUNT, user("1"))
            for _ in range(3):
                slow = asyncio.create_task(renderer.render(COUNT, user("60")))
                await until(lambda: renderer.statistics().running == 1)
                waiting = asyncio.create_task(renderer.render(ECHO, user("never")))
                await until(lambda: renderer.statistics().waiting == 1)
                slow.cancel()
                waiting.cancel()
                results = await asyncio.gather(
                    slow, waiting, *(renderer.render(ECHO, user(str(n))) for n in range(3)), return_exceptions=True
                )
                assert [type(result) for result in results[:2]] == [asyncio.CancelledError] * 2
                assert [result.text for result in results[2:]] == ["0", "1", "2"]
            assert renderer.statistics().running == renderer.statistics().waiting == 0
            assert renderer.statistics().started == 1

    loop(check())


def test_fifty_renders_at_once_all_come_back_right(loop):
    async def check():
        async with running(processes=2) as renderer:
            contents = [f"{number}<|im_end|>" * number for number in range(50)]
            results = await asyncio.gather(*(renderer.render(GOOD, user(content)) for content in contents))
            for number, (content, result) in enumerate(zip(contents, results, strict=True)):
                assert result.text == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
                assert [result.text[a:b] for a, b in result.literals] == ["<|im_end|>"] * number
            assert renderer.statistics().rendered == 50

    loop(check())


def test_waiting_renders_are_served_in_the_order_they_came(loop):
    async def check():
        async with running() as renderer:
            order = []

            async def one(number):
                await renderer.render(ECHO, user("x"))
                order.append(number)

            await asyncio.gather(*map(one, range(30)))
            assert order == list(range(30))

    loop(check())


def test_time_spent_waiting_for_others_and_for_a_new_process_does_not_count(loop):
    async def check():
        async with running(time_limit=1.0) as renderer:
            results = await asyncio.gather(
                *(renderer.render(Template(SPIN), user("x")) for _ in range(2)),
                renderer.render(ECHO, user("last")),
                return_exceptions=True,
            )
            assert [type(result).__mro__[1] for result in results[:2]] == [InvalidRequest] * 2
            assert results[2].text == "last"

    loop(check())


def test_while_one_template_spins_others_render(loop):
    async def check():
        async with running(processes=2) as renderer:
            spinning = asyncio.create_task(renderer.render(Template(SPIN), user("x")))
            await until(lambda: renderer.statistics().running == 1)
            assert (await renderer.render(ECHO, user("other"))).text == "other"
            assert not spinning.done()
            spinning.cancel()

    loop(check())


@pytest.mark.parametrize("run", [asyncio.run, None], ids=["asyncio", "uvloop"])
def test_after_close_no_descriptor_and_no_process_is_left(loop, run):
    async def check():
        before = descriptors()
        async with running(processes=2, time_limit=0.5) as renderer:
            pids = set(renderer.statistics().pids)
            await refusal(renderer, Template(SPIN))
            await renderer.render(ECHO, user("x"))
            await until(lambda: renderer.statistics().started == 3)
            pids |= set(renderer.statistics().pids)
        assert len(pids) == 3
        assert not any(map(is_there, pids))
        assert renderer.statistics().pids == []
        await until(lambda: descriptors() == before)

    (run or loop)(check())


def test_close_ends_running_and_waiting_renders(loop):
    async def check():
        async with running() as renderer:
            tasks = [asyncio.create_task(renderer.render(Template(SPIN), user("x"))) for _ in range(3)]
            await until(lambda: renderer.statistics().waiting == 2 and renderer.statistics().running == 1)
            await renderer.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [ShuttingDown] * 3
            with pytest.raises(ShuttingDown):
                await renderer.render(ECHO, user("x"))

    loop(check())


def test_a_renderer_that_cannot_start_says_so_to_each_render_until_it_can(loop, monkeypatch):
    async def check(executable):
        renderer = Renderer(start_limit=60.0)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", executable)
            await renderer.start()
            assert renderer.statistics().pids == []
            with pytest.raises(InternalError, match="could not be started"):
                await renderer.render(ECHO, user("x"))
        assert (await renderer.render(ECHO, user("x"))).text
        await renderer.close()

    for executable in ("/bin/false", "/nonexistent/python"):
        loop(check(executable))


def test_a_process_that_could_not_be_replaced_is_tried_again_by_later_renders(loop, monkeypatch):
    async def check():
        async with running() as renderer:
            with monkeypatch.context() as broken:
                broken.setattr(sys, "executable", "/nonexistent/python")
                os.kill(renderer.statistics().pids[0], signal.SIGKILL)
                for _ in range(3):
                    with pytest.raises(InternalError, match="could not be started"):
                        await renderer.render(ECHO, user("x"))
            assert (await renderer.render(ECHO, user("again"))).text == "again"

    loop(check())


@pytest.mark.parametrize(
    ("answers", "begun"),
    [
        ("frame(Done(99, 'not yours', []))", False),
        ("frame(Hello())", False),
        ("b'\\x00\\x00\\x00\\x01\\xc1'", False),
        ("b'\\xff\\xff\\xff\\xff'", False),
        ("frame(Began(1)) + frame(Done(0, 'not yours', []))", True),
        ("frame(Began(1)) + frame(Began(1))", True),
    ],
)
def test_an_answer_out_of_step_is_never_given_to_a_caller(loop, monkeypatch, tmp_path, answers, begun):
    impostor = tmp_path / "python"
    impostor.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            import socket
            from slimproc.chat.protocol import *
            stream = socket.socket(fileno=0).makefile("rwb")
            stream.write(frame(Hello()))
            stream.flush()
            while header := stream.read(4):
                stream.read(int.from_bytes(header))
                stream.write({answers})
                stream.flush()
            """)
    )
    impostor.chmod(impostor.stat().st_mode | stat.S_IXUSR)

    async def check():
        with monkeypatch.context() as replaced:
            replaced.setattr(sys, "executable", str(impostor))
            renderer = Renderer(time_limit=10.0, prepare_limit=30.0, start_limit=60.0, processes=1)
            await renderer.start()
        try:
            if begun:
                with pytest.raises(InternalError, match="died while it rendered"):
                    await renderer.render(ECHO, user("mine"))
            assert (await renderer.render(ECHO, user("mine"))).text == "mine"
            assert renderer.statistics().died == 1
        finally:
            await renderer.close()

    loop(check())


def test_the_child_is_confined_and_gets_none_of_the_fronts_environment(loop, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")

    async def check():
        async with running(memory_limit=300 << 20) as renderer:
            proc = Path(f"/proc/{renderer.statistics().pids[0]}")
            assert b"SOME_API_KEY" not in (proc / "environ").read_bytes()
            limits = {line[:26].strip(): line[26:].split()[1] for line in (proc / "limits").read_text().splitlines()}
            assert limits["Max address space"] == str(300 << 20)
            assert limits["Max core file size"] == limits["Max file size"] == limits["Max processes"] == "0"
            assert limits["Max open files"] == "16"

    loop(check())


def test_terminating_signals_meant_for_the_whole_group_leave_the_child_serving(loop):
    async def check():
        async with running() as renderer:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(renderer.statistics().pids[0], number)
            assert (await renderer.render(ECHO, user("x"))).text == "x"
            assert renderer.statistics().started == 1

    loop(check())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child in the middle of a render ends by its alarm")
def test_the_child_dies_with_the_front_even_in_the_middle_of_a_render(loop):
    script = textwrap.dedent("""\
        import asyncio
        from slimproc.chat.templates import Renderer, Template
        async def main():
            renderer = Renderer(time_limit=600.0, processes=2)
            await renderer.start()
            task = asyncio.create_task(renderer.render(Template(input()), [{"role": "user", "content": "x"}]))
            while not renderer.statistics().running:
                await asyncio.sleep(0.01)
            print(*renderer.statistics().pids, flush=True)
            await task
        asyncio.run(main())
        """)
    front = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(slimproc.__file__).parents[1])},
    )
    with front:
        front.stdin.write(SPIN.encode() + b"\n")
        front.stdin.flush()
        pids = [int(word) for word in front.stdout.readline().split()]
        front.kill()
    assert len(pids) == 2
    loop(until(lambda: not any(map(is_alive, pids))))


def test_closed_while_its_processes_start_it_has_not_failed_and_leaves_none_behind():
    async def run():
        renderer = Renderer(start_limit=60.0)
        starting = asyncio.create_task(renderer.start())
        await until(lambda: len(renderer.statistics().pids) == 2)
        pids = renderer.statistics().pids
        await renderer.close()
        await starting
        assert not any(is_alive(pid) for pid in pids)

    asyncio.run(run())
