"""EngineLoop: the life of an engine after its model is loaded: take commands, step, publish, until told to stop."""

from __future__ import annotations

import contextlib
import faulthandler
import select
import time
from typing import TYPE_CHECKING

from slimproc.engines.acceptance import Acceptance
from slimproc.engines.backend import Embedded, Produced, PromptScored, Scored, SequenceFailed
from slimproc.engines.grammar.compiler import GrammarCompiler
from slimproc.engines.lobby import Lobby
from slimproc.engines.pooled import frames
from slimproc.engines.sequence import Sequence, joined
from slimproc.errors import EngineError, InvalidRequest
from slimproc.ipc import wire
from slimproc.ipc.control import ControlClosed
from slimproc.request import Finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slimproc.engines.backend import Backend
    from slimproc.ipc.control import ControlSocket
    from slimproc.ipc.publisher import StepPublisher
    from slimproc.ipc.ring import RingWriter

PHASE_LOADING, PHASE_IDLE, PHASE_PREFILL, PHASE_DECODE, PHASE_ACCEPT = 1, 2, 3, 4, 5
_REARM_NS = 1_000_000_000
"""Arming the watchdog costs 44 us, so it is done once a second, not once a step."""
_LONGEST_WAIT = 1.0
"""Seconds between two steps of a backend that has time: being alive is judged by steps."""


class EngineLoop:
    """One thread owns all of it. Whatever ends a sequence is published exactly once, in ``_steps`` or ``_fail``."""

    def __init__(
        self,
        backend: Backend,
        ready: wire.Ready,
        *,
        control: ControlSocket,
        ring: RingWriter,
        publisher: StepPublisher,
        step_limit: float,
    ) -> None:
        self._backend = backend
        self._ready = ready
        self._model = ready.model
        self._acceptance = Acceptance(backend, ready.model)
        self._control = control
        self._ring = ring
        self._publisher = publisher
        self._step_limit = step_limit
        self._sequences: dict[int, Sequence] = {}
        self._grammars: GrammarCompiler | None = None
        """From the first request that needs it."""
        self._retired: Sequence | None = None
        """The one that ended last, in this step."""
        self._lobby = Lobby()
        self._pending: list[wire.Tok] = []
        """Items that arose between two steps (an echo, a cancellation); they go out with the next frame."""
        self._stopping = False
        self._steps = 0
        self._armed_ns = 0
        self._phase = 0
        self._poll = select.poll()
        self._poll.register(control.fd, select.POLLIN)
        publisher.on_wait = self._while_waiting

    def run(self) -> None:
        """Say READY, which only the loop that will do the work may say, and serve until Shutdown or until the front is
        gone. An exception is a bug, and ends the process.
        """
        try:
            with contextlib.suppress(ControlClosed):
                self._say(self._ready)
                while self._take_commands():
                    self._step()
        finally:
            if self._grammars is not None:
                self._grammars.close()

    # --- commands ---------------------------------------------------------------------------------------------

    def _take_commands(self) -> bool:
        """Handle what has come; wait for it only while there is nothing else to do. False: stop."""
        while not self._stopping:
            self._let_in()
            timeout_ms = self._patience()
            if self._publisher.backlog and not self._wait_for_space(timeout_ms):
                continue
            if self._poll.poll(timeout_ms):
                self._handle_commands()
                if self._grammars is not None:  # also what nobody awaits any more: it keeps the poll from sleeping
                    self._take_grammars(self._grammars)
            break
        return not self._stopping

    def _patience(self) -> float | None:
        """How long to wait for commands, in milliseconds; None: until one comes."""
        if not self._sequences:
            self._go_idle()
            return _LONGEST_WAIT * 1000 if self._lobby.compiling else None
        wait = self._backend.poll_interval
        return 0.0 if wait is None else min(max(wait, 0.0), _LONGEST_WAIT) * 1000

    def _handle_commands(self) -> None:
        if self._control.unsent and self._control.flush():
            self._poll.modify(self._control.fd, select.POLLIN)
        for message in self._control.receive():
            self._handle(wire.decode_command(message))

    def _handle(self, command: wire.Command) -> None:
        match command:
            case wire.Submit() | wire.Embed():
                self._take_in(command)
            case wire.Cancel(rid):
                self._cancel(rid)
            case wire.Tokenize() | wire.Detokenize():
                with self._inside(command.question):
                    answer = self._acceptance.answer(command)
                self._say(answer)
            case wire.Shutdown():
                self._stopping = True
            case wire.Load():
                raise AssertionError("Load comes once, before the loop")

    def _take_in(self, command: wire.Start) -> None:
        """Tokenizing and joining are native calls as well, and about this sequence alone."""
        with self._inside(command.rid):
            self._submit(command) if isinstance(command, wire.Submit) else self._embed(command)

    def _submit(self, command: wire.Submit) -> None:
        try:
            self._require_slot()
            sequence = self._acceptance.sequence(command)
            if command.grammar is not None and sequence.limit:
                sequence.grammar = self._compiler().request(command.rid, command.grammar)
                if sequence.grammar is None:
                    if self._lobby.await_grammar(sequence, command):
                        self._say(wire.Aside(command.rid, aside=True))
                    return
        except (InvalidRequest, EngineError) as error:
            self._refuse(command, error)
            return
        self._enter(sequence, command)

    def _embed(self, command: wire.Embed) -> None:
        try:
            self._require_slot()
            sequence = self._acceptance.pooled(command)
        except (InvalidRequest, EngineError) as error:
            self._refuse(command, error)
            return
        self._enter(sequence, command)

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._backend.grammar_vocabulary)
            self._poll.register(self._grammars.fd, select.POLLIN)
        return self._grammars

    def _take_grammars(self, grammars: GrammarCompiler) -> None:
        for rid, outcome in grammars.done():
            found = self._lobby.compiled(rid)
            if found is None:
                continue  # it was cancelled while the end of one before it waited to be published
            sequence, command, lent = found
            if isinstance(outcome, InvalidRequest | EngineError):
                self._refuse(command, outcome)
                continue
            sequence.grammar = outcome
            if lent:
                self._say(wire.Aside(rid, aside=False))
            with self._inside(rid):
                self._enter(sequence, command)

    def _enter(self, sequence: Sequence, command: wire.Start) -> None:
        """Into the batch, after those that wait for room in it."""
        if self._lobby.entering is not None or len(self._sequences) >= self._model.slots:
            self._lobby.await_room(sequence, command)
        else:
            self._join(sequence, command)

    def _let_in(self) -> None:
        while (rid := self._lobby.entering) is not None and len(self._sequences) < self._model.slots:
            with self._inside(rid):
                self._join(*self._lobby.pop_entering())

    def _join(self, sequence: Sequence, command: wire.Start) -> None:
        joins = sequence.limit > 0 or sequence.scores_prompt or isinstance(command, wire.Embed)
        try:
            if joins:
                self._backend.add(sequence)
        except (InvalidRequest, EngineError) as error:
            self._refuse(command, error)
            return
        if isinstance(command, wire.Submit) and command.echo:
            if sequence.scores_prompt:
                sequence.echo_text = self._acceptance.prompt_text(command)  # it goes out once the prompt was evaluated
            else:
                self._pending.append(wire.Tok(command.rid, self._acceptance.prompt_text(command), 0))
        if joins:
            self._sequences[command.rid] = sequence
            self._phase = 0
        else:
            self._pending.append(sequence.end(Finish.LENGTH))
            self._publish_pending()

    def _require_slot(self) -> None:
        if self._lobby.slots_taken(self._sequences) >= self._model.slots:
            raise EngineError("the engine has no free slot")

    def _cancel(self, rid: int) -> None:
        sequence = self._sequences.pop(rid, None)
        if sequence is not None:
            self._backend.remove(sequence)
            self._phase = 0
        else:
            sequence = self._lobby.leave(rid)
            if sequence is None:
                return  # it ended while the command was on its way
            if self._grammars is not None:
                self._grammars.cancel(rid)
        self._pending.append(sequence.end(Finish.CANCELLED))
        self._publish_pending()

    def _say(self, report: wire.Report) -> None:
        self._control.send(wire.encode(report))
        if self._control.unsent:
            self._poll.modify(self._control.fd, select.POLLIN | select.POLLOUT)

    # --- steps ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self._sequences:
            if self._lobby.compiling:  # a compilation has a deadline of its own; to wait for it is no stall
                self._mark_step(time.monotonic_ns())
            return
        self._note_phase()
        self._ring.mark_inside(1)
        produced = self._backend.step()
        self._ring.mark_inside(0)  # not after an exception, which ends the process as a crash does
        now = time.monotonic_ns()
        if produced or self._phase == PHASE_PREFILL or self._backend.poll_interval:
            self._mark_step(now)  # a step in which nothing was made, read or waited for is no sign of life
        self._rearm(now)
        items, self._pending = self._pending, []
        scored: list[wire.ScoredTok] = []
        ended: list[Embedded | SequenceFailed] = []
        previous = None
        for event in produced:
            if event.sequence is self._retired:
                continue  # it has just ended, and the backend had gone on
            if not isinstance(event, Produced):
                if isinstance(event, Scored | PromptScored):
                    scored += self._take_scored(event)
                    continue
                self._retire(event.sequence)
                ended.append(event)
                continue
            sequence, piece, end = event
            item = sequence.advance(piece, end)
            if item is not None:
                if sequence is previous and items and items[-1].rid == item.rid:
                    items[-1] = joined(items[-1], item)
                else:
                    items.append(item)
                if item.finish:
                    self._retire(sequence)
            previous = sequence
        self._retired = None
        if self._phase == PHASE_PREFILL:
            self._phase = 0  # somebody may have begun to answer
        if items or scored:
            self._publisher.publish(wire.Step(now, items, scored or None))
        elif self._publisher.backlog:
            self._publisher.flush()
        for event in ended:  # only now, since publishing may wait, and who waits hears commands
            self._publish_end(event)

    def _mark_step(self, now: int) -> None:
        self._steps += 1
        self._ring.mark_step(self._steps, now)

    def _take_scored(self, event: Scored | PromptScored) -> list[wire.ScoredTok]:
        sequence = event.sequence
        if isinstance(event, Scored):
            items = sequence.advance_scored(event.score, event.end)
        else:
            items = sequence.echo_scored(event.scores, last=event.last)
        if items and items[-1].finish:
            self._retire(sequence)
        elif sequence.generated == 1:
            self._phase = 0
        return items

    def _retire(self, sequence: Sequence) -> None:
        del self._sequences[sequence.rid]
        self._retired = sequence
        self._backend.remove(sequence)
        self._phase = 0

    def _publish_end(self, event: Embedded | SequenceFailed) -> None:
        if isinstance(event, SequenceFailed):
            self._fail(event.sequence.rid, EngineError.code, event.message)
            return
        for part in frames(event.sequence, event.vector, self._ring.max_payload):
            self._publisher.publish_event(part)

    def _refuse(self, command: wire.Start, error: InvalidRequest | EngineError) -> None:
        if isinstance(command, wire.Embed):
            self._fail(command.rid, error.code, f"{command.name}: {error.message}", command.name)
        else:
            self._fail(command.rid, error.code, error.message, error.param)

    def _fail(self, rid: int, code: str, message: str, param: str | None = None) -> None:
        self._publish_pending()
        self._publisher.publish_event(wire.Failed(rid, code, message, param))

    def _publish_pending(self) -> None:
        if self._pending:
            items, self._pending = self._pending, []
            self._publisher.publish(wire.Step(time.monotonic_ns(), items))

    # --- what others see of us: the black box and the watchdog -------------------------------------------------

    @contextlib.contextmanager
    def _inside(self, number: int) -> Iterator[None]:
        """A native call between two steps, about one command alone. An exception that leaves it ends the process."""
        self._ring.set_phase(PHASE_ACCEPT, [number])
        self._ring.mark_inside(1)
        yield
        self._ring.mark_inside(0)
        self._phase = 0

    def _note_phase(self) -> None:
        """Before a native call, leave word in shared memory of who is in it; rewritten only when that changed."""
        if self._phase:
            return
        prefilling = any(sequence.generated == 0 for sequence in self._sequences.values())
        self._phase = PHASE_PREFILL if prefilling else PHASE_DECODE
        self._ring.set_phase(self._phase, list(self._sequences))
        self._armed_ns = 0
        self._rearm(time.monotonic_ns())

    def _rearm(self, now: int) -> None:
        if now - self._armed_ns > _REARM_NS:
            faulthandler.dump_traceback_later(self._step_limit, exit=True)
            self._armed_ns = now

    def _go_idle(self) -> None:
        if self._phase != PHASE_IDLE:
            self._phase = PHASE_IDLE
            self._ring.set_phase(PHASE_IDLE, [])
            faulthandler.cancel_dump_traceback_later()

    # --- a full ring ------------------------------------------------------------------------------------------

    def _wait_for_space(self, timeout_ms: float | None) -> bool:
        """With a backlog, an engine that is idle or whose front has stopped reading waits for room. False: look again."""
        if self._publisher.flush():
            return True
        if self._sequences:
            if not self._publisher.stuck(time.monotonic()):
                return True
            timeout_ms = _LONGEST_WAIT * 1000
            self._rearm(time.monotonic_ns())  # the front is stopped, not we
        poll = select.poll()
        poll.register(self._control.fd, select.POLLIN)
        poll.register(self._ring.space_fd, select.POLLIN)
        if any(fd == self._control.fd for fd, _ in poll.poll(timeout_ms)):
            self._handle_commands()
        return False

    def _while_waiting(self) -> None:
        """The publisher waits for room (a backend that is faster than any reader): go on hearing the front."""
        if self._phase != PHASE_IDLE:
            self._rearm(time.monotonic_ns())
        if self._poll.poll(0):
            self._handle_commands()
