"""Who is told that a driver does not say whose its bytes are, and when it is too early to say so."""

from types import SimpleNamespace

import pytest

from slimproc.replicas.states import ReplicaState
from slimproc.residency.attribution import Attribution
from slimproc.residency.views import HOST, Claim, DeviceSample, Sample

GPU = "GPU-1"


def unit(device=GPU, *, state=ReplicaState.READY, pid=7, peak=10):
    replica = SimpleNamespace(pid=pid, state=state, resident_since=100.0)
    return SimpleNamespace(device=device, replica=replica, claim=Claim(peak, peak))


def sample(attributed, taken=103.0, fault=""):
    gpu = DeviceSample("gpu", GPU, 100, 90, attributed, fault=fault)
    return Sample(taken, {HOST: DeviceSample("host", HOST, 100, 90), GPU: gpu})


def told(caplog, units, *samples):
    attribution = Attribution()
    for each in samples:
        attribution.look(units, each)
    return caplog.text.count("whose a GPU's bytes are")


@pytest.mark.parametrize("attributed", [None, {}, {7: 0}, {8: 10}])
def test_a_model_in_memory_without_bytes_is_told_of_once(caplog, attributed):
    assert told(caplog, [unit(), unit(pid=9)], *[sample(attributed, taken) for taken in (101.0, 103.0, 104.0)]) == 1


def test_a_driver_that_stops_to_say_it_is_told_of(caplog):
    assert told(caplog, [unit()], sample({7: 10}), sample({7: 10}, 104.0)) == 0
    assert told(caplog, [unit()], sample({7: 10}), sample(None, 104.0)) == 1


@pytest.mark.parametrize(
    ("one", "seen"),
    [
        (unit(), sample({7: 10})),
        (unit(), sample(None, 101.9)),
        (unit(), sample(None, fault="lost")),
        (unit(HOST), sample(None)),
        (unit(None), sample(None)),
        (unit("GPU-2"), sample(None)),
        (unit(state=ReplicaState.STARTING), sample(None)),
        (unit(pid=None), sample(None)),
        (unit(peak=0), sample(None)),
    ],
    ids=["told", "too early", "faulty", "host", "nowhere", "gone", "loading", "not ours", "needs nothing"],
)
def test_nobody_is_told_where_nothing_is_wrong_or_it_cannot_be_known(caplog, one, seen):
    assert told(caplog, [one], seen) == 0
