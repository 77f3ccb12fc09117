"""``slimproc measure MODEL``: what a model needs while it loads and while it serves, as a ``memory:`` block for the file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from slimproc import logs
from slimproc.cli import admin_client
from slimproc.cli.configuration import read_or_exit
from slimproc.cli.measuring import asked as asking
from slimproc.cli.measuring import rewriting
from slimproc.cli.measuring.asked import Asked
from slimproc.cli.measuring.edit import DEFAULT_INDENT, CannotEdit, indent_of
from slimproc.cli.measuring.failures import BadAsk, CannotMeasure
from slimproc.cli.measuring.profile import Measured, block, profile
from slimproc.cli.measuring.session import Session
from slimproc.cli.measuring.showing import Progress, notes
from slimproc.config import Config, MemoryProfile, ModelConfig
from slimproc.config.yaml_source import text_of
from slimproc.errors import EX_CONFIG, ConfigError

_INTERRUPTED = 130


def measure(name: str, flags: Mapping[str, Any]) -> int:
    """Print the block on stdout, everything else on stderr. Status 1: it could not be measured, or written; 2: the command
    line makes no sense; 78: the configuration is wrong; 130: it was interrupted.
    """
    file, config = read_or_exit({"config": flags.get("config")}, unmeasured=True)
    logs.configure("debug" if config.log_level == "debug" else "error", json=config.log_json)
    try:
        asked = asking.read(flags)
        model = _model(config, name)
        _check(file, config, model, asked)
        indent = DEFAULT_INDENT if file is None else indent_of(text_of(file), model.name)
        measured, small = _run(config, model, asked)
    except BadAsk as error:
        return _say(str(error), 2)
    except (CannotMeasure, CannotEdit) as error:
        return _say(str(error), 1)
    except ConfigError as error:
        return _say(str(error), EX_CONFIG)
    except (asyncio.CancelledError, KeyboardInterrupt):
        return _say("interrupted: nothing was written", _INTERRUPTED)
    memory = profile(measured, asked)
    for note in notes(measured, asked.headroom, small=small):
        print(note, file=sys.stderr)
    print("\n".join(block(memory, indent)), flush=True)
    return _write(file, model, memory) if asked.write and file is not None else 0


def _say(text: str, status: int) -> int:
    print(f"slimproc measure: {text}", file=sys.stderr)
    return status


def _write(file: Path, model: ModelConfig, memory: MemoryProfile) -> int:
    try:
        rewriting.rewrite(file, model.name, memory)
    except CannotEdit as error:
        return _say(f"{error}; nothing was written", 1)
    print(f"written to {file}", file=sys.stderr)
    return 0


# --- before anything is started ---------------------------------------------------------------------------------------


def _model(config: Config, name: str) -> ModelConfig:
    """By its name or one of its own aliases. Raises BadAsk for one that is not there, or has nothing to be measured."""
    named = [model for model in config.models.values() if name in (model.name, *model.aliases)]
    if not named or name == "*":
        listed = ", ".join(config.models)
        raise BadAsk(f"there is no model {name[:100]!r}; there are {listed}")
    model = named[0]
    if not model.managed:
        raise BadAsk(
            f"{model.name} is a server with contract: none: it is never loaded here, and needs no memory block"
        )
    return model


def _check(file: Path | None, config: Config, model: ModelConfig, asked: Asked) -> None:
    """Raises BadAsk, CannotMeasure or CannotEdit for what would come out only after all the work."""
    socket = config.admin_socket_for(config.listen.port)
    if admin_client.answers(socket):
        raise CannotMeasure(
            f"a server of this configuration is running ({socket}): stop it, or the numbers mean nothing"
        )
    least = model.concurrency
    if model.upstream is not None and asked.concurrency is not None and asked.concurrency < least:
        raise BadAsk(f"--concurrency: {model.name} serves {least} at once (its key concurrency): measure no fewer")
    if asked.write:
        if file is None:
            raise BadAsk("--write: there is no configuration file to write to")
        rewriting.check(file, model.name)


# --- running ----------------------------------------------------------------------------------------------------------


def _run(config: Config, model: ModelConfig, asked: Asked) -> tuple[Measured, bool]:
    """Raises CannotMeasure, BadAsk, ConfigError, and CancelledError when it is interrupted."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would reap our engines unseen
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_session(config, model, asked))
        except BaseExceptionGroup as group:
            raise _told(group) or group from None


async def _session(config: Config, model: ModelConfig, asked: Asked) -> tuple[Measured, bool]:
    with Progress(model.name, asked.rounds) as progress:
        session = Session(config, model, asked, os.environ, progress)
        _catch_signals(session)
        return await session.run(), session.small


def _catch_signals(session: Session) -> None:
    """The first signal ends what was started in order, the second one at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    heard: list[int] = []

    def on_signal(number: int) -> None:
        if heard:
            session.kill()
            os._exit(128 + number)
        heard.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)


def _told(group: BaseException) -> BaseException | None:
    """The reason in words, if that is what ended it."""
    if isinstance(group, BaseExceptionGroup):
        return next(filter(None, map(_told, group.exceptions)), None)
    return group if isinstance(group, CannotMeasure | BadAsk | ConfigError) else None
