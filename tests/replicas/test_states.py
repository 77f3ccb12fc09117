"""The table of a replica's states, exhaustively; and the page that is drawn from it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from slimproc.errors import IllegalTransition
from slimproc.metrics import STATES
from slimproc.replicas.states import RUNNING, TRANSITIONS, ReplicaEvent, ReplicaState, next_state

DOCS = Path(__file__).parents[2] / "docs"
PAIRS = [(state, event) for state in ReplicaState for event in ReplicaEvent]
LEGAL = {
    "STOPPED": {"START_ASKED": "STARTING"},
    "STARTING": {
        "READY_RECEIVED": "READY",
        "TIMED_OUT": "KILLING",
        "CORRUPT": "KILLING",
        "DEVICE_LOST": "KILLING",
        "EXITED": "BACKOFF",
        "STOP_ASKED": "STOPPING",
    },
    "READY": {
        "STOP_ASKED": "DRAINING",
        "STALLED": "KILLING",
        "CORRUPT": "KILLING",
        "DEVICE_LOST": "KILLING",
        "EXITED": "BACKOFF",
    },
    "DRAINING": {
        "DRAINED": "STOPPING",
        "TIMED_OUT": "STOPPING",
        "DRAIN_ABANDONED": "READY",
        "STALLED": "STOPPING",
        "CORRUPT": "STOPPING",
        "DEVICE_LOST": "STOPPING",
        "EXITED": "STOPPED",
    },
    "STOPPING": {"EXITED": "STOPPED"},
    "KILLING": {"EXITED": "BACKOFF", "STOP_ASKED": "STOPPING"},
    "BACKOFF": {"BACKOFF_ELAPSED": "STARTING", "GAVE_UP": "FAILED", "STOP_ASKED": "STOPPED"},
    "FAILED": {"START_ASKED": "STARTING", "STOP_ASKED": "STOPPED"},
}
"""The design's table, written a second time: a change of the first has to be meant."""


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.name)
def test_an_event_moves_a_replica_as_the_table_says_or_raises(state, event):
    wanted = LEGAL[state.name].get(event.name)
    if wanted is None:
        with pytest.raises(IllegalTransition, match=f"{state.value} cannot hear '{event.value}'"):
            next_state(state, event)
    else:
        assert next_state(state, event) is ReplicaState[wanted]


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        TRANSITIONS[ReplicaState.STOPPED] = {}


def reachable(start: ReplicaState) -> set[ReplicaState]:
    seen, todo = set(), [start]
    while todo:
        for following in TRANSITIONS[todo.pop()].values():
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


@pytest.mark.parametrize("state", ReplicaState, ids=lambda state: state.name)
def test_every_state_leads_to_every_other(state):
    """So each can be reached, and from each a replica can still become READY and STOPPED."""
    assert reachable(state) == set(ReplicaState)


def test_a_process_begins_with_a_start_and_ends_only_with_its_exit():
    for state, events in TRANSITIONS.items():
        for event, following in events.items():
            if (state in RUNNING) != (following in RUNNING):
                begins = following is ReplicaState.STARTING
                assert begins if following in RUNNING else event is ReplicaEvent.EXITED


def test_every_running_state_hears_that_its_process_has_exited():
    assert all(ReplicaEvent.EXITED in TRANSITIONS[state] for state in RUNNING)


def test_the_gauge_has_a_series_for_every_state():
    assert [state.value for state in ReplicaState] == list(STATES)


def test_the_page_shows_the_table_as_it_is():
    """After a change: ``python docs/draw_states.py``."""
    drawing = runpy.run_path(str(DOCS / "draw_states.py"))
    assert (DOCS / "replica-states.md").read_text() == drawing["page"]()


def test_the_page_has_an_arrow_and_a_row_for_every_transition():
    text = (DOCS / "replica-states.md").read_text()
    for state, events in TRANSITIONS.items():
        for event, following in events.items():
            assert f"| {event.value} | {following.value} |" in text
            assert any(
                line.startswith(f"    {state.value} --> {following.value}: ") and event.value in line
                for line in text.splitlines()
            )
