"""The fake backend fails, hangs and dies where it is told to, and loads and unloads as it is told."""

import json
import signal
import subprocess
import sys

import pytest
from driving import Hung, add, pieces, run, script

from slimproc.engines.backend import SequenceFailed, create
from slimproc.engines.fake import FakeBackend
from slimproc.errors import LoadFailed
from slimproc.settings import EngineSettings, FakeSettings


def test_an_error_fails_the_sequence_instead_of_its_token_and_no_other(make, clock):
    backend = make()
    failing = add(backend, script(error_at=3))
    other = add(backend, script(tokens=["a"] * 5))

    heard = run(backend, clock)

    *before, (_, last) = heard[failing]
    assert [event.piece for _, event in before] == [b" tok0", b" tok1"]
    assert isinstance(last, SequenceFailed)
    assert "token 3" in last.message
    assert len(heard[other]) == 5


def test_a_fault_after_the_last_token_never_happens(make, clock):
    assert pieces(make(), clock, script(tokens=["a", "b"], error_at=3, die_at=4, hang_at=5)) == [b"a", b"b"]


def test_several_faults_come_each_at_its_own_token(make, clock):
    survived = script(die_at=2, signal=int(signal.SIGCHLD), error_at=4)  # a signal that nobody dies of

    backend = make()
    sequence = add(backend, survived)
    *before, (_, last) = run(backend, clock)[sequence]

    assert [event.piece for _, event in before] == [b" tok0", b" tok1", b" tok2"]
    assert isinstance(last, SequenceFailed)


def test_a_hang_begins_at_its_token_and_stays_inside_the_step():
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise Hung

    backend = FakeBackend(EngineSettings(model="m", backend="fake"), sleep=sleep)
    add(backend, script(hang_at=2))
    assert len(backend.step()) == 1
    assert slept == []

    with pytest.raises(Hung):
        backend.step()
    assert min(slept) > 60


PROGRAM = """
import sys
from slimproc.engines.fake import FakeBackend
from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Submit
from slimproc.settings import EngineSettings, FakeSettings
import msgspec

fake, prompt = sys.argv[1:]
backend = FakeBackend(EngineSettings(model="m", backend="fake", fake=msgspec.json.decode(fake, type=FakeSettings)))
backend.load(lambda fraction: print("load", fraction, flush=True))
sequence = Sequence(Submit(rid=1, prompt=prompt), [1], 100)
backend.add(sequence)
for _ in range(5):
    print([event.piece.decode() for event in backend.step()], flush=True)
"""


def run_process(prompt="hello", **fake):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(fake), prompt],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("number", [None, signal.SIGSEGV, signal.SIGABRT])
def test_the_engine_dies_of_the_signal_just_before_the_token(number):
    keys = {} if number is None else {"signal": int(number)}

    process = run_process(script(die_at=3, **keys))

    assert process.returncode == -(number or signal.SIGKILL)
    assert process.stdout.splitlines() == ["load 1.0", "[' tok0']", "[' tok1']"]


def test_the_engine_dies_before_its_first_token():
    process = run_process(script(die_at=1))

    assert process.returncode == -signal.SIGKILL
    assert process.stdout.splitlines() == ["load 1.0"]


def test_the_engine_dies_halfway_through_its_load():
    process = run_process(die_in_load=int(signal.SIGTERM), load_time=0.2)

    assert process.returncode == -signal.SIGTERM
    assert process.stdout.splitlines() == ["load 0.25"]


def test_a_load_takes_its_time_and_tells_its_progress(make, clock):
    told = []

    make(load_time=2.0).load(lambda fraction: told.append((clock.now - 1000.0, fraction)))

    assert told == sorted(told)
    assert len(told) > 10
    assert told[-1] == (pytest.approx(2.0), 1.0)


def test_a_load_error_is_not_permanent(make):
    with pytest.raises(LoadFailed, match="out of luck") as raised:
        make(load_error="out of luck").load(lambda _: None)

    assert not raised.value.permanent


def test_it_can_ignore_sigterm(make):
    before = signal.getsignal(signal.SIGTERM)
    try:
        make().load(lambda _: None)
        assert signal.getsignal(signal.SIGTERM) is before

        make(ignore_sigterm=True).load(lambda _: None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_unload_takes_its_time(make, clock):
    make(unload_time=1.5).close()

    assert clock.now == 1001.5


def test_an_unload_can_hang():
    def sleep(seconds):
        if seconds > 60:
            raise Hung

    engine = EngineSettings(model="m", backend="fake", fake=FakeSettings(hang_in_unload=True))

    with pytest.raises(Hung):
        FakeBackend(engine, sleep=sleep).close()


@pytest.mark.parametrize(("asked", "context"), [(None, 4096), (100, 100), (500_000, 500_000), (10**7, 1_048_576)])
def test_the_context_is_what_was_asked_for_up_to_the_models_own(make, asked, context):
    assert make(context=asked).load(lambda _: None).context == context


def test_what_it_says_of_itself(make):
    info = make(bytes=12345).load(lambda _: None)

    assert info.details["bytes"] == 12345
    assert info.slots == 4
    assert info.eos_token in info.control_tokens


def test_the_engine_finds_it_by_its_name():
    assert isinstance(create(EngineSettings(model="m", backend="fake")), FakeBackend)
