"""Reloader: puts another configuration in force while the server runs. ``reload.py`` says what differs.

The change itself happens in one turn of the loop, so no request ever sees half of it. What is replaced or removed ends
afterwards, each in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slimproc import logs
from slimproc.admission.controller import AdmissionController, ModelLimits
from slimproc.chat.book import TemplateBook
from slimproc.config import Config, ModelConfig
from slimproc.config.addresses import server_of
from slimproc.errors import ConfigError
from slimproc.fleet import Fleet, limits_of
from slimproc.metrics import Metrics
from slimproc.reload import Difference, compare
from slimproc.replicas.replica import Replica
from slimproc.replicas.supervisor import Supervisor
from slimproc.residency.service import ResidencyService

log = logs.get("slimproc.reload")


class Reconfigurable(Protocol):
    """The HTTP service."""

    def reconfigure(self, config: Config) -> None: ...


@dataclass(frozen=True)
class Parts:
    """Of the server: whatever holds something of the configuration."""

    fleet: Fleet
    supervisor: Supervisor
    admission: AdmissionController
    residency: ResidencyService
    metrics: Metrics
    templates: TemplateBook
    http: Reconfigurable


class Reloader:
    """``read`` makes the configuration anew, or raises ConfigError. One call of ``reload`` at a time."""

    def __init__(
        self,
        config: Config,
        overrides: Mapping[str, str],
        read: Callable[[], Config],
        parts: Parts,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """``overrides``: the chat templates in force; ``tasks``: where what ends is waited for."""
        self.config = config
        self._overrides = overrides
        self._read = read
        self._parts = parts
        self._tasks = tasks
        self._leaving: dict[str, tuple[ModelConfig, asyncio.Task[None]]] = {}
        """Models that were removed and are still asked by who came before."""
        self._ending: set[asyncio.Task[None]] = set()
        self._unloading: dict[Replica, tuple[str, int]] = {}
        """Replicas on their way out that will unload their server when they have drained."""

    async def reload(self) -> str:
        """Read again and put in force what was read. Returns what is wrong with it, and then nothing has changed; else ""."""
        log.info("reloading")
        try:
            await self._parts.residency.wait_known()
            config, overrides = await asyncio.to_thread(self._read_all)
            difference = compare(self.config, config)
            self._parts.residency.check(difference.config)
        except ConfigError as error:
            return _refused(error.message)
        except Exception as error:
            log.exception("a configuration could not be read")
            return _refused(f"{type(error).__name__}: {error}")
        self._apply(difference, overrides)
        return ""

    def close(self) -> None:
        """The server stops everything itself."""
        for task in (*(task for _, task in self._leaving.values()), *self._ending):
            task.cancel()

    def _read_all(self) -> tuple[Config, dict[str, str]]:
        config = self._read()
        return config, template_overrides(config)

    def _apply(self, difference: Difference, overrides: dict[str, str]) -> None:
        old, config, parts = self.config, difference.config, self._parts
        made = {name: self._make(config.models[name]) for name in (*difference.added, *difference.replaced)}
        templates = [name for name in config.models if overrides.get(name) != self._overrides.get(name)]
        self.config, self._overrides = config, overrides
        again = [name for name in difference.replaced if any(one.has_process for one in parts.supervisor.of(name))]
        for name, replicas in made.items():
            self._place(name, replicas, old.models.get(name))
        for name, model in config.models.items():
            for replica in parts.supervisor.of(name):
                replica.set_limits(limits_of(model))
        parts.residency.reconfigure(config, [replica for replicas in made.values() for replica in replicas])
        parts.templates.reconfigure(overrides)
        parts.http.reconfigure(config)
        parts.admission.reconfigure(
            model_limits(config),
            max_queue_total=config.max_queue_total,
            refuse_while_loading=config.while_loading == "refuse",
            strict=config.order == "strict",
        )
        parts.residency.begin(difference.added, again)
        for name in difference.removed:
            last = self._tasks.create_task(self._leave(old.models[name]), name=f"the last requests of {name}")
            self._leaving[name] = old.models[name], last
        self._spare_servers()
        logs.configure(config.log_level, json=config.log_json)
        _tell(difference, templates)

    def _make(self, model: ModelConfig) -> list[Replica]:
        self._parts.metrics.add(model.name)
        return self._parts.fleet.replicas(model, self._parts.supervisor.indices(model.name))

    def _place(self, name: str, replicas: list[Replica], before: ModelConfig | None) -> None:
        if name in self._leaving:  # it was removed by an earlier reload: who still waits for it moves on, too
            before, last = self._leaving.pop(name)
            last.cancel()
        old = self._parts.supervisor.replace(name, replicas)
        if before is not None:
            self._end_all(before, old)

    async def _leave(self, model: ModelConfig) -> None:
        """Who came before it was removed is answered; then it goes."""
        await self._parts.admission.wait_none(model.name)
        del self._leaving[model.name]
        self._parts.admission.remove(model.name)
        self._end_all(model, self._parts.supervisor.retire(model.name))

    def _end_all(self, model: ModelConfig, replicas: Sequence[Replica]) -> None:
        """They were made for ``model``. A server that is still configured, under whatever name, is not unloaded: it goes on
        with its new replica, which finds it in memory.
        """
        servers: Sequence[tuple[str, int] | None] = _servers(model) or [None] * len(replicas)
        for replica, server in zip(replicas, servers, strict=True):
            if server is not None:
                self._unloading[replica] = server
            self._end(replica)
        self._spare_servers()

    def _spare_servers(self) -> None:
        """What was to be unloaded and is configured by now is left as it is."""
        kept = {server for one in self.config.models.values() for server in _servers(one)}
        for replica in [replica for replica, server in self._unloading.items() if server in kept]:
            del self._unloading[replica]
            replica.ask_stop(self.config.drain_timeout, leave=True)

    def _end(self, replica: Replica) -> None:
        self._parts.residency.retire(replica)
        replica.ask_stop(self.config.drain_timeout)
        task = self._tasks.create_task(self._bury(replica), name=f"the end of {replica.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _bury(self, replica: Replica) -> None:
        await replica.wait_stopped()
        self._unloading.pop(replica, None)
        parts = self._parts
        parts.residency.remove(replica)
        parts.supervisor.remove(replica)
        if replica.model not in self.config.models and not parts.supervisor.indices(replica.model):
            parts.metrics.remove(replica.model)
        log.info("a replica is gone", replica=replica.name)


def _servers(model: ModelConfig) -> list[tuple[str, int]]:
    """Host and port of each replica's, if they are not ours."""
    return [server_of(url) for url in model.remote.base_urls] if model.remote is not None else []


def model_limits(config: Config) -> dict[str, ModelLimits]:
    """What admission has to know of each model."""
    return {
        name: ModelLimits(model.max_queue, forwards=model.upstream is not None) for name, model in config.models.items()
    }


def template_overrides(config: Config) -> dict[str, str]:
    """The chat templates that take the place of models' own. Raises ConfigError for one that cannot be read any more."""
    found = {}
    for name, model in config.models.items():
        if model.chat_template is not None:
            try:
                found[name] = model.chat_template.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"models.{name}.chat_template: {error}") from None
    return found


def _refused(message: str) -> str:
    problems = message.splitlines() or ["it cannot be read"]
    for problem in problems:
        log.error("the configuration is wrong, and the old one stays in force", problem=problem)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more


def _tell(difference: Difference, templates: list[str]) -> None:
    for key in difference.restart:
        log.warning("a changed setting needs a restart", setting=key)
    new = {*difference.added, *difference.replaced}
    changed = dict.fromkeys([*difference.changed, *(name for name in templates if name not in new)])
    told = {
        "added": difference.added,
        "removed": difference.removed,
        "replaced": difference.replaced,
        "changed": changed,
        "settings": difference.settings,
    }
    log.info("reloaded", **{key: ", ".join(names) or None for key, names in told.items()})
