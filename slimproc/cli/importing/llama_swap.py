"""llama-swap's configuration: commands that are started on a port, and stopped to make room for each other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from slimproc.cli.importing.fields import Fields
from slimproc.cli.importing.macros import Macros, read_macros
from slimproc.cli.importing.writing import Settings
from slimproc.config.addresses import canonical_host
from slimproc.config.lists import PORT_VARIABLE
from slimproc.config.problems import clip, shown
from slimproc.errors import ConfigError

_LEVELS = {"warn": "warning"}
_CONCURRENCY = 10
"""llama-swap's own, where ``concurrencyLimit`` is 0 or left out."""
_CONTAINERS = frozenset({"docker", "podman", "nerdctl"})
_LEAST_LOAD_TIMEOUT = 15
_REQUEST_TIMEOUT = 3600
_MAX_BODY = "64MiB"
_LOST = {
    "apiKeys": "slimproc has no keys in this version: let nobody reach it who may not use it",
    "peers": "give each its own model with remote and contract: none",
    "profiles": "there is nothing like it",
    "selectors": "there is nothing like it",
    "matrix": "what may be in memory together is decided by the bytes that are free",
    "startPort": "every server gets a port that is free",
}
_LOST_OF_MODEL = {
    "cmdStop": "slimproc stops a server with SIGTERM, and with SIGKILL after unload_timeout",
    "useModelName": "a request's own model name is forwarded as it is",
    "filters": "requests are forwarded as they are",
    "timeouts": "see request_timeout and load_timeout",
    **dict.fromkeys(
        ("description", "metadata", "capabilities", "sendLoadingState", "compat"), "there is nothing like it"
    ),
}


def translate(top: Fields, environ: Mapping[str, str]) -> Settings:
    """Our settings. ``environ``: for ``${env.NAME}``. Raises ConfigError."""
    used: set[str] = set()
    macros = Macros(read_macros(top), environ, used)
    settings: Settings = {}
    if level := top.text("logLevel"):
        settings["log_level"] = _LEVELS.get(level, level)
    settings["load_timeout"] = max(top.number("healthCheckTimeout") or 120, _LEAST_LOAD_TIMEOUT)
    if unload_timeout := top.number("unloadTimeout"):
        settings["unload_timeout"] = unload_timeout
    settings["request_timeout"] = _REQUEST_TIMEOUT
    ttl = top.number("globalTTL") or 0
    models: Settings = {}
    for name, fields in top.named("models"):
        if (model := _model(name, fields, macros, ttl)) is not None:
            models[name] = model
    if not models:
        raise ConfigError("none of its models can be carried over: " + "; ".join(top.notes.lines))
    _groups(top, models)
    if preload := _preload(top, models):
        settings["preload"] = preload
    settings["models"] = models
    _tell(top, models, used)
    return settings


def _model(name: str, fields: Fields, macros: Macros, ttl: float) -> Settings | None:
    """One model, or None where slimproc could not start it."""
    own = macros.with_own({"MODEL_ID": name, **read_macros(fields)})
    command = _command(fields, own)
    if command is None:
        return None
    model: Settings = {"command": command}
    if display := fields.text("name"):
        model["name"] = own.expand(display, fields.path("name"))
    if aliases := fields.texts("aliases"):
        model["aliases"] = aliases
    if fields.flag("unlisted"):
        model["unlisted"] = True
    seconds = fields.number("ttl")
    if seconds := ttl if seconds is None or seconds < 0 else seconds:
        model["ttl"] = seconds
    if seconds := fields.number("unloadTimeout"):
        model["unload_timeout"] = seconds
    model["concurrency"] = fields.number("concurrencyLimit") or _CONCURRENCY
    model["inference_path"] = "/v1/chat/completions"
    model["max_body"] = _MAX_BODY
    for key, why in _LOST_OF_MODEL.items():
        fields.lost(key, why)
    fields.finish()
    return model


def _command(fields: Fields, macros: Macros) -> Settings | None:
    argv = _argv(fields, macros)
    env = dict(_environment(fields, macros))
    port = _fixed_port(fields, macros)
    has_port = any(PORT_VARIABLE in text for text in (*argv[1:], *env.values()))
    if port == 0 or (not has_port and (port is None or not _free_port(argv, port))):
        why = (
            "its server is somewhere else (proxy)"
            if port == 0
            else "nothing in its cmd says the port that it is to take"
        )
        fields.notes.add(fields.where, f"left out: {why}; give it remote instead")
        return None
    if not has_port:
        fields.notes.add(fields.path("cmd"), f"{PORT_VARIABLE} in the place of its port {port}, which slimproc chooses")
    command: Settings = {"argv": argv}
    if env:
        command["env"] = env
    if check := fields.text("checkEndpoint"):
        check = macros.expand(check, fields.path("checkEndpoint"))
        if check == "none":
            why = "slimproc waits until command.ready_path (/health) answers 2xx: set it to a path that does"
            fields.notes.add(fields.path("checkEndpoint"), f"not carried over: {why}")
        else:
            command["ready_path"] = check
    return command


def _argv(fields: Fields, macros: Macros) -> list[str]:
    """``cmd`` as a shell would split it, without its comment lines."""
    where = fields.path("cmd")
    text = fields.text("cmd")
    lines = [line for line in (text or "").split("\n") if not line.strip().startswith("#")]
    whole = macros.expand(re.sub(r"\\\s*\n", " ", "\n".join(lines) + "\n"), where)
    try:
        argv = shlex.split(whole)
    except ValueError as error:
        raise ConfigError(f"{where}: {str(error).lower()}") from None
    if not argv:
        raise ConfigError(f"{where}: wanted a command, not {shown(text)}")
    if argv[0].rpartition("/")[2] in _CONTAINERS:
        fields.notes.add(where, "a container's memory is not seen as this command's, and a SIGKILL does not reach it")
    if "/" in argv[0] and not argv[0].startswith(("/", "~/")):
        fields.notes.add(where, "its program is taken from the directory of the file that you write this to")
    return argv


def _environment(fields: Fields, macros: Macros) -> Iterator[tuple[str, str]]:
    for index, text in enumerate(fields.texts("env") or ()):
        name, equals, value = text.partition("=")
        if equals:
            yield name, macros.expand(value, f"{fields.path('env')}[{index}]", strict=False)
        else:
            fields.notes.add(f"{fields.path('env')}[{index}]", f"not carried over: {clip(text)!r} is no NAME=VALUE")


def _fixed_port(fields: Fields, macros: Macros) -> int | None:
    """The port that ``proxy`` names. None: the one that llama-swap chooses; 0: not one of this machine."""
    where = fields.path("proxy")
    proxy = macros.expand(fields.text("proxy") or f"http://localhost:{PORT_VARIABLE}", where)
    chosen = PORT_VARIABLE in proxy
    try:
        url = urlsplit(proxy.replace(PORT_VARIABLE, "1"))
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        raise ConfigError(f"{where}: wanted a URL, not {shown(proxy)}") from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{where}: wanted a URL, not {shown(proxy)}")
    if url.scheme == "https" or canonical_host(url.hostname) != "localhost":
        return 0
    if url.path.strip("/"):
        fields.notes.add(
            where, f"its path {clip(url.path)!r} is not carried over: requests go to the paths that they name"
        )
    return None if chosen else port


def _free_port(argv: list[str], port: int) -> bool:
    """Put the variable where a command names its port; False where it does not, or more than once."""
    named = re.compile(rf"(?:(.*[=:])|)({port})(?:(:.*)|)")
    places = [index for index, text in enumerate(argv) if index and named.fullmatch(text)]
    if len(places) != 1:
        return False
    found = named.fullmatch(argv[places[0]])
    assert found is not None
    argv[places[0]] = f"{found[1] or ''}{PORT_VARIABLE}{found[3] or ''}"
    return True


def _groups(top: Fields, models: Settings) -> None:
    """Groups say by name what may be in memory together; bytes decide here. Who is persistent is pinned."""
    found = top.named("groups")
    routing = top.inside("routing")
    router = routing.inside("router") if routing is not None else None
    settings = router.inside("settings") if router is not None else None
    if settings is not None:
        found += settings.named("groups")
        settings.lost("matrix", _LOST["matrix"])
        settings.finish()
    if router is not None:
        router.finish("use")
    if routing is not None:
        routing.finish()
    for _, group in found:
        members = [member for member in group.texts("members") or () if member in models]
        if group.flag("persistent"):
            for member in members:
                models[member]["pin"] = True
            top.notes.add(group.where, "its models are pinned; whether they are together in memory is decided by bytes")
        else:
            top.notes.add(group.where, "not carried over: what may be in memory together is decided by bytes")
        group.finish("swap", "exclusive")


def _preload(top: Fields, models: Mapping[str, Any]) -> list[str]:
    hooks = top.inside("hooks")
    start = hooks.inside("on_startup") if hooks is not None else None
    names = {alias: name for name, model in models.items() for alias in (*model.get("aliases", ()), name)}
    wanted = [name.strip() for name in (start.texts("preload") or () if start is not None else ())]
    for fields in (start, hooks):
        if fields is not None:
            fields.finish()
    return list(dict.fromkeys(names[name] for name in wanted if name in names))


def _tell(top: Fields, models: Mapping[str, Any], used: set[str]) -> None:
    """What is to be known about the whole."""
    for key, why in _LOST.items():
        top.lost(key, why)
    top.finish("logToStdout", "logTimeFormat", "logRequests", "ui", "metricsMaxInMemory", "captureBuffer", "store")
    notes = top.notes
    if used:
        notes.add(", ".join(f"${{env.{name}}}" for name in sorted(used)), "written out as the environment has it now")
    notes.add("listen", "llama-swap has it in a flag (-listen, else :8080); here it is 127.0.0.1:8000 until you set it")
    notes.add(
        "request_timeout", f"llama-swap has no limit; {_REQUEST_TIMEOUT} s is chosen, and {_MAX_BODY} as max_body"
    )
    unmeasured = ", ".join(models)
    notes.add(unmeasured, "unmeasured: `slimproc measure` has to write the memory of each before it can be served")
