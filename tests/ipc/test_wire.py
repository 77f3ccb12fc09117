"""Every message comes out of its decoder as it went in, and nothing else is taken for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.ipc import wire
from slimproc.request import Finish, SamplingParams, Usage
from slimproc.settings import EngineSettings, FakeSettings

COMMANDS = [
    wire.Load(2**63 - 1, EngineSettings(model="m", backend="fake", slots=2, fake=FakeSettings(load_time=0.5)), 30.0),
    wire.Submit(rid=1, prompt="hello é 🎈"),
    wire.Submit(
        rid=2**32, prompt=[1, 2, 3], literals=[(0, 4)], chat=True, max_tokens=0, stop=("a", "\n"), echo=True, logprobs=3,
        sampling=SamplingParams(temperature=0.0, seed=7, logit_bias={5: -100.0}),
    ),
    wire.Embed(rid=4, prompt="hello é 🎈", name="input"),
    wire.Embed(rid=5, prompt=[1, 2], name="documents[3]", query="q", dimensions=256),
    wire.Cancel(3),
    wire.Tokenize(1, "text", add_special=True, parse_special=False),
    wire.Detokenize(2, [1, 2]),
    wire.Shutdown(),
]  # fmt: skip
REPORTS = [
    wire.Progress(0.25),
    wire.Ready(2**63 - 1, wire.ModelInfo(context=2048, slots=4, vocab_size=10, details={"a": 1, "b": "x"}), 1.5),
    wire.LoadRefused("no such file", permanent=True),
    wire.Tokenized(1, [1]),
    wire.Detokenized(2, "é"),
    wire.QuestionRefused(3, "no", "tokens"),
    wire.Aside(4, aside=True),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_commands_round_trip(command):
    assert wire.decode_command(wire.encode(command)) == command


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: type(r).__name__)
def test_reports_round_trip(report):
    assert wire.decode_report(wire.encode(report)) == report


def test_every_kind_of_message_is_tried_here():
    assert {type(command) for command in COMMANDS} == set(wire.Command.__args__)
    assert {type(report) for report in REPORTS} == set(wire.Report.__args__)


NUMBERS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**32)
TOKS = st.builds(
    wire.Tok,
    rid=NUMBERS,
    text=st.text(st.characters(codec="utf-8")),
    tokens=COUNTS,
    finish=st.sampled_from(Finish).map(int),
    usage=st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS),
)


@given(st.builds(wire.Step, at_ns=NUMBERS, items=st.lists(TOKS)))
def test_steps_round_trip(step):
    assert wire.decode_step(wire.encode(step)) == step


@given(
    st.builds(wire.Failed, rid=NUMBERS, code=st.text(st.characters(codec="utf-8")))
    | st.builds(wire.Embedded, rid=NUMBERS, vector=st.binary(), usage=st.none() | st.builds(Usage, COUNTS))
)
def test_events_round_trip(event):
    assert wire.decode_event(wire.encode(event)) == event


@pytest.mark.parametrize("decode", [wire.decode_command, wire.decode_report, wire.decode_step, wire.decode_event])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "unheard of"}),
        wire.encode(wire.Step(1, [wire.Tok(1, "x")]))[:-1],
        msgspec.msgpack.encode([1, [["rid", "text"]]]),
    ],
)
def test_what_is_no_message_is_refused(decode, data):
    with pytest.raises(msgspec.MsgspecError):
        decode(data)


def test_a_command_is_not_taken_for_a_report():
    with pytest.raises(msgspec.ValidationError):
        wire.decode_report(wire.encode(wire.Cancel(1)))
