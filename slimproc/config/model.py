"""One model as the rest of slimproc sees it: frozen, complete, every value parsed and in range.

A field's ``Annotated`` kind is what the key accepts, its default what the key means when it is absent. To add a
setting, add a field here or in ``whole.py``, a row to docs/configuration.md and a line to config.example.yaml, and print
docs/slimproc.schema.json anew (``slimproc check-config --schema``); tests hold them together. Which models take it is said
by the sets below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from slimproc.config.addresses import INFERENCE_PATH
from slimproc.config.lists import ADAPTERS, DEVICE
from slimproc.config.upstream import Command, MemoryProfile, Remote
from slimproc.config.values import BOOLEAN, NAME, NAMES, PATH, choice, integer, kinds_of, seconds, size
from slimproc.settings import BACKENDS, EngineSettings, FakeSettings, LoraAdapter, OnCrash

ANY_NAME = "*"
"""The alias under which a model answers to any name that no other model has."""
LOCAL_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank")
"""What a local model can answer on ``/infer``."""

MODEL_BLOCKS = ("fake", "memory", "remote", "command")
"""Keys whose values are mappings with keys of their own: ``blocks.py``."""
LOCAL_KEYS = frozenset().union(*(traits.own_keys for traits in BACKENDS.values())) | {
    "backend", "path", "replicas", "slots", "context", "threads", "gpu_layers", "max_tokens_limit", "chat_template",
    "confine", "on_crash",
}  # fmt: skip
UPSTREAM_KEYS = frozenset({"remote", "command", "concurrency", "max_body", "prepare_timeout"})
LIFECYCLE_KEYS = frozenset(
    {"memory", "device", "pin", "ttl", "min_resident", "load_timeout", "unload_timeout", "prepare_timeout"}
)
"""What only a model that is loaded and unloaded can have."""

Seconds = Annotated[float, seconds()]
_SIZES = size(1, 1 << 50)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One entry under ``models:``. It has a ``backend``, or it is ``remote``, or it is a ``command``."""

    name: str
    """The entry's own name: what callers say, what metrics and logs are labelled with."""
    display_name: Annotated[str, NAME] = ""
    """The key ``name``: shown in the list of models and nowhere else. As parsed never empty: it defaults to the name."""
    backend: Annotated[Literal["llama_cpp", "mlx", "fake"] | None, choice("llama_cpp", "mlx", "fake")] = None
    """None: an upstream."""
    remote: Remote | None = None
    command: Command | None = None
    aliases: Annotated[tuple[str, ...], NAMES] = ()
    unlisted: Annotated[bool, BOOLEAN] = False
    max_queue: Annotated[int, integer(0, 1_000_000)] = 32
    """Requests (not sequences) that may wait for this model. 0: only what can start at once is taken. As parsed, an
    upstream that does not say has ``max_queue_total``.
    """
    inference_path: Annotated[str, INFERENCE_PATH] = LOCAL_ENDPOINTS[0]
    """Where ``/infer`` goes: a path of the upstream, or one of LOCAL_ENDPOINTS."""
    request_timeout: Seconds = 120.0
    load_timeout: Seconds = 120.0
    unload_timeout: Seconds = 30.0
    prepare_timeout: Seconds = 60.0
    """The four as parsed: the model's own, else the top-level value. ``origins`` has those that are its own."""

    pin: Annotated[bool, BOOLEAN] = False
    ttl: Annotated[float | None, seconds()] = None
    """Seconds without a request after which it is unloaded. None: never for that."""
    min_resident: Annotated[float, seconds(zero=True)] = 0.0
    device: Annotated[str | None, DEVICE] = None
    """``host``, or a GPU by UUID. None: where it fits."""
    memory: MemoryProfile | None = None
    """For each replica. None: a local model that was not measured, or ``contract: none``."""

    path: Annotated[str | None, PATH] = None
    """A specification for model_path.resolve; an ordinary path is absolute by now."""
    replicas: Annotated[int, integer(1, 64)] = 1
    """As parsed, a remote model has one for each of its base URLs."""
    slots: Annotated[int, integer(1, 256)] = 4
    context: Annotated[int | None, integer(8, 1 << 24)] = None
    threads: Annotated[int | None, integer(1, 1024)] = None
    gpu_layers: Annotated[int | None, integer(0, 10_000)] = None
    pooling: Annotated[Literal["mean", "cls", "last"] | None, choice("mean", "cls", "last")] = None
    """None: the file decides whether the model makes vectors, and how."""
    lora: Annotated[tuple[LoraAdapter, ...], ADAPTERS] = ()
    """Paths as ``path`` has them."""
    kv_type: Annotated[Literal["f16", "q8_0", "q4_0"], choice("f16", "q8_0", "q4_0")] = "f16"
    flash_attention: Annotated[bool | None, BOOLEAN] = None
    mmap: Annotated[bool, BOOLEAN] = True
    speculation: Annotated[int, integer(0, 16)] = 0
    confine: Annotated[Literal["auto", "strict", "jit", "off"], choice("auto", "strict", "jit", "off")] = "auto"
    """What an engine gives up before it loads; auto: jit with a GPU, else strict. As parsed: its own, else the top-level value."""
    max_tokens_limit: Annotated[int | None, integer(1, 1 << 24)] = None
    on_crash: Annotated[OnCrash, choice("fail", "resume")] = "fail"
    chat_template: Annotated[Path | None, PATH] = None
    """A file that takes the place of the model's own template. It could be read with the configuration."""
    fake: FakeSettings = FakeSettings()

    concurrency: Annotated[int, integer(1, 4096)] = 1
    """Requests at once in each server of an upstream."""
    max_body: Annotated[int | None, _SIZES] = None
    """Bytes; None for local models alone."""
    origins: dict[str, str] = {}
    """Where each key was given; a key that is not in it was not given for this model."""

    @property
    def upstream(self) -> Remote | Command | None:
        """Who serves it when no engine of ours does."""
        return self.remote or self.command

    @property
    def managed(self) -> bool:
        """Whether it is loaded and unloaded at all. False: a server that is simply there."""
        return self.remote is None or self.remote.contract == "control"

    def takes(self, key: str) -> bool:
        """Whether a key of the file means anything for this kind of model."""
        if (key in LIFECYCLE_KEYS and not self.managed) or (key == "prepare_timeout" and self.remote is None):
            return False
        if any(key in traits.own_keys and key in MODEL_BLOCKS for traits in BACKENDS.values()):
            return self.backend is not None and key in BACKENDS[self.backend].own_keys
        if key in MODEL_BLOCKS and key != "memory":
            return getattr(self, key) is not None
        return key not in (UPSTREAM_KEYS if self.upstream is None else LOCAL_KEYS)

    def engine_settings(self) -> EngineSettings:
        """What each of this model's engines is started with. Local models only."""
        assert self.backend is not None, "an upstream has no engine"
        return EngineSettings(
            model=self.name,
            backend=self.backend,
            path=self.path,
            slots=self.slots,
            context=self.context,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            pooling=self.pooling,
            lora=self.lora,
            kv_type=self.kv_type,
            flash_attention=self.flash_attention,
            mmap=self.mmap,
            speculation=self.speculation,
            confine=self.confine,
            fake=self.fake,
        )


MODEL_KINDS = {("name" if field == "display_name" else field): kind for field, kind in kinds_of(ModelConfig).items()}
