"""A question that engines die of is refused like any other work that does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slimproc.admission.suspects import Suspects
from slimproc.errors import EngineCrashed, InvalidRequest, Quarantined, ServiceUnavailable
from slimproc.http.gateway import Gateway
from slimproc.ipc import wire
from slimproc.metrics import Metrics
from tests.fakes import looped


def tokenize(text):
    return lambda number: wire.Tokenize(number, text, True, True)


class Mortal:
    """An engine that dies of a question, each time another one."""

    def __init__(self) -> None:
        self.deaths = 0

    async def ask(self, make):
        question = make(7)
        if question.text == "fatal":
            self.deaths += 1
            raise EngineCrashed("it died", inside_of=self.deaths)
        return wire.Tokenized(7, [1])


@looped
async def test_two_engines_die_of_a_question_and_no_third():
    engine, metrics = Mortal(), Metrics(["m"])
    gateway = SimpleNamespace(
        supervisor=SimpleNamespace(of=lambda _: [SimpleNamespace(serving_engine=engine)]),
        admission=SimpleNamespace(suspects=Suspects(set(), lambda _: None)),
        metrics=metrics,
    )
    model = SimpleNamespace(name="m")
    for _ in range(2):
        with pytest.raises(EngineCrashed):
            await Gateway.ask(gateway, model, tokenize("fatal"))
    with pytest.raises(Quarantined):
        await Gateway.ask(gateway, model, tokenize("fatal"))
    assert engine.deaths == 2
    assert metrics.model("m").rejected["poison"] == 1
    assert (await Gateway.ask(gateway, model, tokenize("harmless"))).tokens == [1]


@looped
async def test_a_question_that_is_refused_is_counted_like_any_other_request():
    class Refusing:
        async def ask(self, make):
            raise InvalidRequest("no such token", param="tokens")

    metrics, engines = Metrics(["m"]), [Refusing(), None]
    gateway = SimpleNamespace(
        supervisor=SimpleNamespace(of=lambda _: [SimpleNamespace(serving_engine=engines[0])]),
        admission=SimpleNamespace(suspects=Suspects(set(), lambda _: None)),
        metrics=metrics,
    )
    for reason, error in (("invalid", InvalidRequest), ("unavailable", ServiceUnavailable)):
        with pytest.raises(error):
            await Gateway.ask(gateway, SimpleNamespace(name="m"), tokenize("x"))
        assert metrics.model("m").rejected[reason] == 1
        engines.pop(0)
