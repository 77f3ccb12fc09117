"""A request that an upstream answers: its slot, its deadlines, its one end, and what breaks its handler's work off."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from slimproc.admission.passage import Forward
from slimproc.errors import BackendFailed, DeadlineExceeded, InvalidRequest, Overloaded, QueueTimeout, ShuttingDown
from slimproc.replicas.states import ReplicaState
from slimproc.request import NEVER, Deadline
from slimproc.upstream.slot import UpstreamSlot
from tests.fakes import FakeReplica, looped, turns


class Server:
    """An upstream's life: slots and nothing else."""

    def __init__(self, replica: FakeReplica, slots: int = 1) -> None:
        self.name, self.slots, self.base_url = replica.name, slots, f"http://{replica.name}"
        self.taken: set[UpstreamSlot] = set()
        self.unreachable: list[str] = []
        self.ready_since = time.monotonic()
        self._replica = replica
        replica.engine = self  # type: ignore[assignment]
        replica.become(ReplicaState.READY)

    @property
    def occupied(self) -> int:
        return len(self.taken)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.taken)

    def take_slot(self) -> UpstreamSlot:
        slot = UpstreamSlot(self)
        self.taken.add(slot)
        return slot

    def give_back(self, slot: UpstreamSlot) -> None:
        self.taken.remove(slot)
        self._replica.on_change(self._replica)

    def note_unreachable(self, reason: str) -> None:
        self.unreachable.append(reason)


def forward(*, queue: float | None = None, seconds: float | None = None, model: str = "m") -> Forward:
    now = time.monotonic()
    return Forward(
        id="r",
        model=model,
        deadline=NEVER if seconds is None else Deadline.after(seconds, now),
        queue_deadline=NEVER if queue is None else Deadline.after(queue, now),
    )


@looped
async def test_a_passage_waits_for_a_slot_and_gives_it_back_when_it_ends(open_desk):
    desk = open_desk()
    passage = desk.controller.pass_on(forward())
    waiting = asyncio.ensure_future(passage.wait_granted())
    await turns()
    assert not waiting.done()
    server = Server(desk.replica)
    slot = await waiting
    assert slot.base_url == "http://m/0"
    assert desk.controller.in_flight() == {"m": 1}
    passage.close("ok")
    passage.close("engine_error")
    assert not server.taken
    assert desk.outcomes() == {"ok": 1}
    assert desk.replica.well_served == 1
    assert desk.metrics.model("m").queue_wait.count == 1
    assert desk.metrics.model("m").request_duration.count == 1


@looped
async def test_generations_and_passages_wait_in_the_same_way_and_the_total_bounds_both(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"), max_queue_total=2)
    generation, passage = desk.submit(model="a"), desk.controller.pass_on(forward(model="b"))
    with pytest.raises(Overloaded):
        desk.controller.pass_on(forward(model="b"))
    assert desk.outcomes("b") == {"overloaded": 1}
    generation.close()
    passage.close()


@looped
async def test_the_queues_deadline_is_504_and_holds_only_until_the_slot(open_desk):
    desk = open_desk()
    late, timely = desk.controller.pass_on(forward(queue=0.02)), desk.controller.pass_on(forward(queue=0.3))
    with pytest.raises(QueueTimeout):
        await late.wait_granted()
    Server(desk.replica)
    await timely.wait_granted()
    await asyncio.sleep(0.4)
    assert not timely.outcome
    timely.close("ok")
    assert desk.outcomes() == {"timeout": 1, "ok": 1}


@looped
async def test_a_queue_deadline_that_has_passed_never_gets_a_slot(open_desk):
    desk = open_desk()
    server = Server(desk.replica)
    passage = desk.controller.pass_on(forward(queue=-1))
    with pytest.raises(QueueTimeout):
        await passage.wait_granted()
    assert not server.taken


@pytest.mark.parametrize("how", ["deadline", "shutdown", "lost"])
@looped
async def test_what_ends_a_passage_breaks_off_its_handlers_work(open_desk, how):
    desk = open_desk()
    server = Server(desk.replica)
    passage = desk.controller.pass_on(forward(seconds=0.02 if how == "deadline" else None))
    broken_off = False

    async def handler() -> None:
        nonlocal broken_off
        async with passage.held():
            await passage.wait_granted()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                broken_off = True
                raise

    task = asyncio.ensure_future(handler())
    await turns()
    if how == "shutdown":
        desk.controller.abort()
    elif how == "lost":
        next(iter(server.taken)).lose("killed")
    kinds = {"deadline": DeadlineExceeded, "shutdown": ShuttingDown, "lost": BackendFailed}
    with pytest.raises(kinds[how]):
        await task
    assert broken_off
    assert not server.taken
    assert desk.outcomes() == {{"deadline": "timeout", "lost": "engine_error"}.get(how, how): 1}


@looped
async def test_an_error_of_the_handler_ends_it_and_what_broke_the_work_off_is_told_in_its_place(open_desk):
    desk = open_desk()
    Server(desk.replica, slots=2)
    passage, other = desk.controller.pass_on(forward()), desk.controller.pass_on(forward())
    with pytest.raises(InvalidRequest):
        async with passage.held():
            raise InvalidRequest("the body is broken")
    assert passage.outcome == "invalid"

    async def broken_off() -> None:
        async with other.held():
            other.fail(ShuttingDown("bye"))
            raise BackendFailed("the connection was closed")

    with pytest.raises(ShuttingDown):
        await broken_off()
    assert desk.outcomes() == {"invalid": 1, "shutdown": 1}


@looped
async def test_a_handler_that_is_cancelled_frees_everything(open_desk):
    desk = open_desk()
    server = Server(desk.replica)
    first, second = desk.controller.pass_on(forward()), desk.controller.pass_on(forward())

    async def handler() -> None:
        async with first.held():
            await first.wait_granted()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(handler())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert desk.outcomes() == {"cancelled": 1}
    await second.wait_granted()
    second.close("ok")
    assert not server.taken


@looped
async def test_what_could_not_be_reached_is_left_out_once(open_desk):
    desk = open_desk(FakeReplica(), FakeReplica(index=1))
    gone, there = (Server(replica) for replica in desk.replicas)
    passage = desk.controller.pass_on(forward())
    assert (await passage.wait_granted()).engine_name == gone.name
    passage.try_another(BackendFailed("nobody there"))
    assert gone.unreachable == ["nobody there"]
    assert not gone.taken
    assert (await passage.wait_granted()).engine_name == there.name
    with pytest.raises(BackendFailed, match="again"):
        passage.try_another(BackendFailed("again"))
    passage.close()
    assert not there.taken
    assert desk.metrics.model("m").queue_wait.count == 1


@looped
async def test_who_tries_another_server_keeps_its_place(open_desk):
    desk = open_desk(FakeReplica(), FakeReplica(index=1))
    gone, there = (Server(replica) for replica in desk.replicas)
    first, second, third = (desk.controller.pass_on(forward()) for _ in range(3))
    gone.slots = 0
    first.try_another(BackendFailed("nobody there"))
    second.close("ok")
    assert (await first.wait_granted()).engine_name == there.name
    assert not third.started
    for passage in (first, third):
        passage.close()
    assert not there.taken


@looped
async def test_with_no_other_server_what_could_not_be_reached_is_told(open_desk):
    desk = open_desk()
    server = Server(desk.replica)
    passage = desk.controller.pass_on(forward())
    await passage.wait_granted()
    with pytest.raises(BackendFailed):
        passage.try_another(BackendFailed("nobody there"))
    passage.close("engine_error")
    assert not server.taken


@looped
async def test_one_line_says_how_it_went(open_desk, caplog):
    desk = open_desk()
    Server(desk.replica)
    passage = desk.controller.pass_on(forward())
    passage.status, passage.bytes_in, passage.bytes_out = 200, 5, 7
    with caplog.at_level(logging.INFO, "slimproc.generation"):
        passage.close("ok")
    (record,) = caplog.records
    assert record.message == "request forwarded"
    fields = record.fields
    assert {name: fields[name] for name in ("request_id", "model", "replica", "outcome", "status")} == {
        "request_id": "r",
        "model": "m",
        "replica": "m/0",
        "outcome": "ok",
        "status": 200,
    }
    assert (fields["bytes_in"], fields["bytes_out"], fields["reason"]) == (5, 7, None)
    assert fields["queue_wait_ms"] >= 0
    assert fields["duration_ms"] >= fields["queue_wait_ms"]
