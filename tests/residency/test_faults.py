"""What faults of GPUs are called: in metrics by a kind, for people in words."""

import pytest

from slimproc import metrics
from slimproc.residency.probes.faults import KINDS, in_words, kind_of


def test_metrics_know_every_kind():
    assert metrics.FAULTS == KINDS


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("lost", "lost", "reset"),
        ("driver_mismatch", "driver_mismatch", "reboot"),
        ("unknown: Unknown Error", "unknown", "Unknown Error"),
        ("lost in space", "unknown", "lost in space"),
    ],
)
def test_every_fault_is_of_a_kind_and_keeps_its_words(fault, kind, word):
    assert kind_of(fault) == kind
    assert word in in_words(fault)
