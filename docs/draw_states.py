"""Draws docs/replica-states.md from the table in slimproc/replicas/states.py: run it after changing the table."""  # noqa: INP001  # a script

from __future__ import annotations

from pathlib import Path

from slimproc.replicas.states import RUNNING, TRANSITIONS, ReplicaState

PAGE = Path(__file__).with_name("replica-states.md")

_HEAD = """\
# The life of a replica

Drawn by `python docs/draw_states.py` from the table in `slimproc/replicas/states.py`, which also has the rules that a
table cannot say. One task owns each replica (`slimproc/replicas/owner.py`); every change of state goes through the
table, and an event that it has no row for raises `IllegalTransition` and changes nothing.
"""


def page() -> str:
    return f"{_HEAD}\n{_diagram()}\n{_table()}"


def _diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> stopped"]
    for state, events in TRANSITIONS.items():
        by_target: dict[ReplicaState, list[str]] = {}
        for event, target in events.items():
            by_target.setdefault(target, []).append(event.value)
        lines += [f"    {state.value} --> {target.value}: {', '.join(names)}" for target, names in by_target.items()]
    return "\n".join((*lines, "```", ""))


def _table() -> str:
    lines = ["| state | has a process | event | next |", "|---|---|---|---|"]
    for state, events in TRANSITIONS.items():
        process = "yes" if state in RUNNING else "no"
        lines += [f"| {state.value} | {process} | {event.value} | {to.value} |" for event, to in events.items()]
    return "\n".join((*lines, ""))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
