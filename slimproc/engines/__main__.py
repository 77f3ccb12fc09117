"""An engine process: ``python -m slimproc.engines PARENT_PID CREDIT``, started by the front and by nobody else.

It inherits four descriptors by number (below), hears what to be in the first command, imports the backend, confines
itself, loads the model, says READY, and runs the loop. Everything that it or a native library prints goes to stderr, which the front keeps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from slimproc.engines import confine, lifeline
from slimproc.engines.backend import create
from slimproc.engines.loop import PHASE_LOADING, EngineLoop
from slimproc.errors import LoadFailed
from slimproc.ipc import wire
from slimproc.ipc.control import ControlClosed, ControlSocket
from slimproc.ipc.credit import open_credit_reader, open_credit_writer
from slimproc.ipc.publisher import StepPublisher
from slimproc.ipc.ring import RingWriter
from slimproc.model_path import resolve

if TYPE_CHECKING:
    from slimproc.engines.backend import Backend
    from slimproc.settings import EngineSettings

CONTROL_FD, RING_FD, DATA_FD, SPACE_FD = 3, 4, 5, 6
LOAD_LIMIT = 3600.0
"""Seconds until the engine's own watchdog ends a load; the front's ``load_timeout`` is the one that is configured."""
OOM_SCORE_ADJ = 500
EXIT_BUG, EXIT_LOAD_REFUSED = 1, 4


def main(parent: int, credit: str) -> int:
    """The exit status. Raises what is a bug of ours or of a backend."""
    lifeline.tie_to_parent(parent)
    _close_inherited()
    _be_the_first_to_go()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the front, which then tells us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    control = ControlSocket(socket.socket(fileno=CONTROL_FD))
    ring = RingWriter(RING_FD, open_credit_writer(credit, DATA_FD), open_credit_reader(credit, SPACE_FD))
    try:
        load = _first_command(control)
        ring.set_phase(PHASE_LOADING, [])
        return _serve(load, control, ring)
    except ControlClosed:
        return 0


def _first_command(control: ControlSocket) -> wire.Load:
    poll = select.poll()
    poll.register(control.fd, select.POLLIN)
    while True:
        poll.poll()
        messages = control.receive()
        if messages:
            command = wire.decode_command(messages[0])
            assert isinstance(command, wire.Load), "the front says what to load, and then waits for READY"
            if len(messages) > 1:
                raise ControlClosed  # only Shutdown may come before READY: nobody wants this model any more
            return command


def _serve(load: wire.Load, control: ControlSocket, ring: RingWriter) -> int:
    def report(message: wire.Report) -> None:
        control.send(wire.encode(message))

    faulthandler.dump_traceback_later(LOAD_LIMIT, exit=True)
    began = time.monotonic()
    try:
        settings = _resolved(load.settings)
        backend = create(settings)
        faulthandler.cancel_dump_traceback_later()  # its thread, too, shall begin confined
        confinement = _confine(settings, backend)
        lifeline.watch_socket(CONTROL_FD)
        faulthandler.dump_traceback_later(LOAD_LIMIT, exit=True)
        model = backend.load(lambda fraction: report(wire.Progress(fraction)))
    except LoadFailed as error:
        report(wire.LoadRefused(error.message, error.permanent, error.scarce))
        return EXIT_LOAD_REFUSED
    faulthandler.cancel_dump_traceback_later()
    model = structs.replace(model, details=model.details | {"confinement": str(confinement)})
    ready = wire.Ready(load.epoch, model, time.monotonic() - began)
    publisher = StepPublisher(ring, wait_for_room=getattr(backend, "wait_for_room", False))
    EngineLoop(backend, ready, control=control, ring=ring, publisher=publisher, step_limit=load.step_limit).run()
    faulthandler.cancel_dump_traceback_later()
    backend.close()
    return 0


def _resolved(settings: EngineSettings) -> EngineSettings:
    """With the files' own paths, found while we may still look around. Raises LoadFailed."""
    if settings.path is None or settings.backend == "fake":  # which reads no file
        return settings
    lora = []
    for adapter in settings.lora:
        with contextlib.suppress(LoadFailed):  # the backend will say it, and of which adapter
            adapter = structs.replace(adapter, path=str(resolve(adapter.path)))  # noqa: PLW2901
        lora.append(adapter)
    return structs.replace(settings, path=str(resolve(settings.path)), lora=tuple(lora))


def _confine(settings: EngineSettings, backend: Backend) -> confine.Confinement:
    files = [] if settings.path is None else confine.model_files(Path(settings.path))
    files += [Path(adapter.path) for adapter in settings.lora]
    scratch, uses_gpu = getattr(backend, "scratch", ()), getattr(backend, "uses_gpu", False)
    reached = confine.confine(settings.confine, files, scratch, uses_gpu=uses_gpu)
    if reached.missing:
        print(f"confinement: {reached}", file=sys.stderr, flush=True)  # noqa: T201  # stderr is this process's log
    return reached


def _be_the_first_to_go() -> None:
    """Where memory runs out, the kernel shall end an engine, which is started again, and not the front."""
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        if int(file.read_text()) < OOM_SCORE_ADJ:
            file.write_text(str(OOM_SCORE_ADJ))


def _close_inherited() -> None:
    """Close what the operator's shell left open (posix_spawn cannot), and keep stdout out of every protocol."""
    highest = max(int(entry.name) for entry in Path("/dev/fd").iterdir())
    os.closerange(SPACE_FD + 1, highest + 1)
    os.dup2(2, 1)


if __name__ == "__main__":
    try:
        code = main(int(sys.argv[1]), sys.argv[2])
    except Exception:  # noqa: BLE001  # the last frame of this process: the front reads it off stderr
        traceback.print_exc()
        code = EXIT_BUG
    sys.stderr.flush()
    os._exit(code)  # exit handlers of native libraries crash, and the memory goes with the process anyway
