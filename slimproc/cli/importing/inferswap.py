"""InferSwap's configuration: one GPU, and servers with the control contract."""

from __future__ import annotations

from typing import Any

from slimproc.cli.importing.fields import Fields
from slimproc.cli.importing.writing import Settings

_LEVELS = {"warn": "warning"}
_LIFECYCLES = {
    "healthCheckTimeout": "load_timeout",
    "unloadTimeout": "unload_timeout",
    "prepareTimeout": "prepare_timeout",
}
_LIMITS = {"queueTimeout": "queue_timeout", "statusTimeout": "status_timeout", "drainTimeout": "drain_timeout"}
_UPPER_BOUNDS = (
    "taken as upper bounds: InferSwap measures all that is used on the GPU, whoever uses it. "
    "`slimproc measure MODEL` measures what is the model's own"
)


def translate(top: Fields) -> Settings:
    """Our settings. Where InferSwap's default is another than ours, its own is written out. Raises ConfigError."""
    settings: Settings = {"listen": top.text("listen") or ":8080"}
    if level := top.text("logLevel"):
        settings["log_level"] = _LEVELS.get(level, level)
    settings["order"] = "strict"
    top.notes.add(
        "order", "strict, as InferSwap has it; fair (our default) lets a request pass one that it cannot delay"
    )
    _put(settings, "max_queue_total", top.number("maxQueueSize"))
    for theirs, ours in {**_LIFECYCLES, **_LIMITS}.items():
        _put(settings, ours, top.number(theirs))
    settings["shutdown_timeout"] = _or(top.number("shutdownTimeout"), 60)
    _put(settings, "preload", top.texts("preload"))
    settings["memory"] = _memory(top.inside("gpu"))
    settings["models"] = models = {name: _model(fields) for name, fields in top.named("models")}
    measured = [name for name, model in models.items() if "memory" in model]
    if measured:
        top.notes.add(f"the peaks of {', '.join(measured)}", _UPPER_BOUNDS)
    top.finish()
    return settings


def _memory(gpu: Fields | None) -> Settings:
    """The one GPU. InferSwap keeps nothing free unless it is told to."""
    if gpu is None:
        return {"margin": 0}
    memory: Settings = {"margin": _or(gpu.number("safetyMarginBytes"), 0)}
    _put(memory, "max_sample_age", gpu.number("maxObservationAge"))
    if device := gpu.text("device"):
        memory["devices"] = [device]
    gpu.finish()
    return memory


def _model(fields: Fields) -> Settings:
    remote: Settings = {}
    _put(remote, "base_url", fields.text("baseURL"))
    if (prepare := fields.inside("prepare")) is not None:
        if (argv := prepare.texts("argv")) is not None:
            remote["prepare"] = {"argv": argv}
        prepare.finish()
    model: Settings = {"remote": remote}
    _put(model, "name", fields.text("name") or None)
    _put(model, "aliases", fields.texts("aliases"))
    _put(model, "unlisted", fields.flag("unlisted"))
    _put(model, "inference_path", fields.text("inferencePath"))
    _put(model, "max_body", fields.number("maxBodyBytes"))
    _put(model, "concurrency", fields.number("concurrencyLimit"))
    if "prepare" not in remote:
        fields.lost("prepareTimeout", "the model has no prepare")
    for theirs, ours in _LIFECYCLES.items():
        _put(model, ours, fields.number(theirs))
    if (profile := fields.inside("resourceProfile")) is not None:
        model["memory"] = _profile(profile)
    else:
        fields.notes.add(fields.where, "unmeasured: `slimproc measure` has to write its memory before it can be served")
    fields.finish()
    return model


def _profile(profile: Fields) -> Settings:
    memory: Settings = {}
    _put(memory, "load_peak", profile.number("loadPeakBytes"))
    _put(memory, "inference_peak", profile.number("inferencePeakBytes"))
    _put(memory, "residual", profile.number("unloadedResidualBytes"))
    _put(memory, "max_concurrency", profile.number("maxConcurrency"))
    _put(memory, "profile_id", profile.text("profileId"))
    profile.lost("limits", "it is for people")
    profile.finish()
    return memory


def _put(settings: Settings, key: str, value: Any) -> None:
    if value is not None:
        settings[key] = value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
