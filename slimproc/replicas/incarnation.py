"""Incarnation: one engine process from spawn to burial, the slots it offers and the sequences in flight in it.

Invariant: every started sequence gets exactly one terminal event. The engine gives it, or ``bury`` does.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable

from slimproc import logs
from slimproc.errors import (
    EngineCrashed,
    InternalError,
    InvalidRequest,
    RingCorrupt,
    ServiceUnavailable,
    SlimprocError,
    error_of,
)
from slimproc.ipc import wire
from slimproc.metrics import ModelMetrics
from slimproc.replicas.environment import engine_environment
from slimproc.replicas.exits import ExitStatus
from slimproc.replicas.life import Post, Refusal
from slimproc.replicas.limits import EngineLimits
from slimproc.replicas.link import EngineLink
from slimproc.replicas.process import EngineProcess
from slimproc.replicas.slot import Slot
from slimproc.replicas.stall import StallWatch
from slimproc.replicas.states import ReplicaEvent
from slimproc.settings import EngineSettings
from slimproc.stream import Flushable, TokenStream, VectorStream

log = logs.get("slimproc.replica")


class Incarnation:
    """``post`` brings news to the owner's mailbox; ``on_slot_free`` tells admission."""

    def __init__(
        self,
        name: str,
        replica: int,
        settings: EngineSettings,
        limits: EngineLimits,
        metrics: ModelMetrics,
        *,
        post: Post,
        on_slot_free: Callable[[], None],
        device: str | None = None,
    ) -> None:
        """Spawn. Raises OSError, and then nothing is left over."""
        self.name = name
        self._limits = limits
        self._metrics = metrics
        self._post = post
        self._on_slot_free = on_slot_free
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, TokenStream] = {}
        self._reserved = 0
        self._aside: set[int] = set()
        """Sequences whose slots others may have for now."""
        self._been_aside: set[int] = set()
        """Those, and those whose slots others might have had before."""
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[wire.Report]] = {}
        self._ready: wire.Ready | None = None
        self.progress = 0.0
        self.refused: Refusal | None = None
        self.tokens = 0
        self.dead = False
        self.ready_since = 0.0
        self.status: ExitStatus | None = None
        self.process = EngineProcess(
            name=name,
            replica=replica,
            ring_size=limits.ring_size,
            credit=limits.credit,
            environ=engine_environment(limits.environ, settings.backend, device),
        )
        self._stall_watch = StallWatch(
            lambda: self.process.reader.progress().steps,
            lambda reason: self._post(ReplicaEvent.STALLED, self, reason),
            stall_timeout=limits.stall_timeout,
            cancel_grace=limits.cancel_grace,
        )
        self._link = EngineLink(self.process, self)
        self.process.watch_exit(self._on_exit, limits.oom_kills)
        self._link.send(wire.Load(self.process.epoch, settings, max(60.0, 2 * limits.stall_timeout)))

    # --- slots and sequences --------------------------------------------------------------------------------------

    @property
    def model(self) -> wire.ModelInfo:
        assert self._ready is not None, "asked of an engine that is not ready"
        return self._ready.model

    @property
    def ready(self) -> wire.Ready | None:
        return self._ready

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    @property
    def load_seconds(self) -> float:
        return self._ready.load_seconds if self._ready else 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def slots(self) -> int:
        return self._ready.model.slots if self._ready else 0

    @property
    def drained(self) -> bool:
        return self.occupied == 0

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    @property
    def occupied(self) -> int:
        """Slots that are taken, whether or not their sequence has been started, and sequences that are set aside."""
        return len(self._streams) + self._reserved

    @property
    def free_slots(self) -> int:
        if self._ready is None or self.dead or self._stall_watch.overdue:
            return 0
        return max(0, self._ready.model.slots - self.occupied + len(self._aside))

    def take_slot(self) -> Slot:
        assert self.free_slots > 0, "the caller looks before it takes"
        self._reserved += 1
        return Slot(self)

    def give_back(self) -> None:
        self._reserved -= 1
        self._on_slot_free()

    def start(self, stream: TokenStream, submit: Callable[[int], wire.Start]) -> int:
        """Turn a reserved slot into a running sequence."""
        self._reserved -= 1
        rid = next(self._numbers)
        self._streams[rid] = stream
        if self.dead:
            # It died between the decision and now. Its end comes from here, in a later turn, as if it had been in it.
            self._loop.call_soon(self._lose, rid, self._crash())
            return rid
        self._link.send(submit(rid))
        self._stall_watch.started(rid)
        return rid

    def cancel(self, rid: int) -> None:
        """Ask the engine to stop a sequence; its terminal event frees the slot."""
        if rid in self._streams:
            self._stall_watch.asked_to_stop(rid)
            self._link.send(wire.Cancel(rid))

    # --- questions ------------------------------------------------------------------------------------------------

    async def ask(self, make: Callable[[int], wire.Command]) -> wire.Report:
        """Ask the engine something and wait for its answer; the caller sets the limit. Raises InvalidRequest,
        ServiceUnavailable where the engine died meanwhile, and EngineCrashed where it died of the question.
        """
        if self.dead:
            raise self._crash()
        number = next(self._numbers)
        answer = self._questions[number] = self._loop.create_future()
        try:
            self._link.send(make(number))
            report: wire.Report = await answer
        finally:
            self._questions.pop(number, None)
        if isinstance(report, wire.QuestionRefused):
            raise InvalidRequest(report.message, param=report.param)
        return report

    # --- what the link brings ---------------------------------------------------------------------------------------

    def on_report(self, report: wire.Report) -> None:
        match report:
            case wire.Progress(fraction):
                self.progress = fraction
            case wire.Ready():
                if report.epoch != self.process.epoch or self._ready is not None:
                    raise RingCorrupt("READY came twice, or from another incarnation")
                self._ready = report
                self._stall_watch.reload_takes(report.load_seconds)
                self.ready_since = time.monotonic()
                self._post(ReplicaEvent.READY_RECEIVED, self, "")
            case wire.LoadRefused():
                self.refused = Refusal(report.message, report.permanent, report.scarce)
            case wire.Tokenized() | wire.Detokenized() | wire.QuestionRefused():
                future = self._questions.get(report.question)
                if future is not None and not future.done():
                    future.set_result(report)
            case wire.Aside(rid, aside):
                self._set_aside(rid, aside=aside)

    def _set_aside(self, rid: int, *, aside: bool) -> None:
        """What comes back before its slot does waits for it in the engine; meanwhile more are occupied than there are. Each
        waits for its grammar once: whatever an engine says more often sets nothing off.
        """
        if not aside:
            self._aside.discard(rid)
        elif rid in self._streams and rid not in self._been_aside and len(self._aside) < wire.MOST_ASIDE:
            self._aside.add(rid)
            self._been_aside.add(rid)
            self._on_slot_free()

    def on_step(self, step: wire.Step, gathering: list[Flushable] | None) -> None:
        streams = self._streams
        at_ns = step.at_ns
        produced = 0
        items = step.items if step.scored is None else [*step.scored, *step.items]
        for item in items:
            stream = streams.get(item.rid)
            if stream is None:
                continue
            produced += item.tokens
            try:
                stream.take(item, at_ns, gathering)
            except Exception as error:  # noqa: BLE001  # a bug in one stream's encoding must not cost the others
                self._blame(item.rid, stream, error)
            if item.finish:
                self._release(item.rid)
        self.tokens += produced
        self._metrics.generated_tokens += produced
        self._metrics.batch_size.observe(len(items))

    def on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Failed():
                self._lose(event.rid, error_of(event.code, event.message, event.param))
            case wire.Embedded(rid, vector, usage):
                stream = self._streams.get(rid)
                if isinstance(stream, VectorStream):
                    stream.take_vector(vector, usage, time.monotonic_ns())
                elif stream is not None:
                    raise RingCorrupt("a vector for a sequence that generates text")
                if usage is not None and stream is not None:
                    self._release(rid)

    def on_corrupt(self, error: RingCorrupt) -> None:
        log.error("an engine is corrupt", replica=self.name, reason=error.message)
        self._post(ReplicaEvent.CORRUPT, self, error.message)

    def _release(self, rid: int) -> None:
        self._forget(rid)
        self._on_slot_free()

    def _lose(self, rid: int, error: SlimprocError) -> None:
        stream = self._forget(rid)
        if stream is not None:
            stream.fail(error)
            self._on_slot_free()

    def _forget(self, rid: int) -> TokenStream | None:
        self._stall_watch.ended(rid)
        self._aside.discard(rid)
        self._been_aside.discard(rid)
        return self._streams.pop(rid, None)

    def _blame(self, rid: int, stream: TokenStream, error: Exception) -> None:
        log.exception("a stream failed to take its token", replica=self.name, error=repr(error))  # noqa: LOG004  # in one
        self.cancel(rid)
        self._streams[rid] = TokenStream(stream.index)  # takes what still comes
        stream.fail(InternalError("the answer could not be encoded"))

    # --- the end ------------------------------------------------------------------------------------------------------

    killable = True
    unload_failed = ""

    def drain(self, *, begin: bool) -> None:
        """Nothing to do: who starts sequences is decided in the front."""

    def let_go(self) -> None:
        """Nothing to do: an engine does not outlive us."""

    def ask_to_exit(self) -> None:
        self._link.send(wire.Shutdown())
        if self._ready is None:
            self.terminate()  # it loads, and hears nothing until that is done

    def terminate(self) -> None:
        self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)

    def _on_exit(self, status: ExitStatus) -> None:
        self.dead = True
        self.status = status
        self._link.drain_what_is_left()  # its last words come before the news of its death
        self._post(ReplicaEvent.EXITED, self, str(status))

    def give_up(self, reason: str) -> None:
        """It may hang for ever, and who waits for it does not: deliver what was published, then fail what is unfinished."""
        self._fail_unfinished(reason)

    def bury(self, reason: str) -> None:
        """After EXITED: deliver what was published, then fail what is unfinished, then give everything back."""
        self._fail_unfinished(reason)
        self._metrics.ring_full += self.process.reader.progress().full_hits
        self.process.close()

    def _fail_unfinished(self, reason: str) -> None:
        self.dead = True
        self._stall_watch.close()
        self._link.drain_what_is_left()
        self._link.close()
        lost = list(self._streams)
        self._crash_reason = reason
        box = self.process.reader.black_box()
        suspects = set(box.rids) if box.inside else set()
        for rid in lost:
            self._lose(rid, self._crash(inside=rid in suspects))
        for number, question in self._questions.items():
            if not question.done():
                inside = number in suspects
                question.set_exception(
                    self._crash(inside=True) if inside else ServiceUnavailable(f"the engine died: {reason}")
                )

    _crash_reason = "it died before the request reached it"

    def _crash(self, *, inside: bool = False) -> EngineCrashed:
        return EngineCrashed(
            f"the engine process ended while it had this request: {self._crash_reason}",
            inside_of=self.process.epoch if inside else None,
        )
