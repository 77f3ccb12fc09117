"""The whole server on the pipe credit, which is what macOS has; on Linux the environment can ask for it."""

from __future__ import annotations

from tests.serving import fake, script


def test_streams_crashes_and_restarts_work_on_the_pipe_credit(serve):
    server = serve(fake(slots=4, context=100_000) | {"credit": "pipe"})

    flat_out = server.complete("hi", max_tokens=20_000)
    assert flat_out.json["usage"]["completion_tokens"] == 20_000
    assert flat_out.text.endswith(" tok19999")

    with server.stream(script(token_latency=0.01), max_tokens=10_000) as reader:
        reader.take(3)
        server.kill_engine()
        assert next(event for event in reader.events() if "error" in event)["error"]["code"] == "engine_crashed"
    assert server.complete("hi", max_tokens=2).text == " tok0 tok1"
