"""Nothing that a token costs the front may hold anybody else up."""

from __future__ import annotations

from tests.serving import fake, script

PROBES = 10


def test_sixteen_streams_at_an_easy_pace_leave_the_event_loop_free(serve):
    """Fifty steps a second in each of two engines: a probe is answered within a few of them. Time is counted in steps, so
    that a machine that is busy with something else slows both.
    """
    server = serve(fake(slots=8, replicas=2, context=100_000))
    pending = [server.begin(script(token_latency=0.02), stream=True, max_tokens=90_000) for _ in range(16)]
    server.wait_sequences(8, 8)
    before = server.metric("generated_tokens_total", model="fake")
    for _ in range(PROBES):
        assert server.get("/healthz").status == 200
    steps = (server.metric("generated_tokens_total", model="fake") - before) / 16
    for one in pending:
        one.close()
    server.wait_idle()
    assert steps < 5 * (PROBES + 1), f"{steps:.0f} steps passed while {PROBES} probes were answered"
