"""What an engine is started with. The configuration fills it, the wire carries it, a backend reads it.

A leaf of its own because both sides of the process border need these types and neither may import the other.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import msgspec


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``fake:`` block of a model: how the fake backend loads, answers and misbehaves. Times in seconds."""

    ttft: float = 0.0
    """From a sequence's start to its first token."""
    token_latency: float = 0.0
    """Between two tokens of one sequence. Zero: as fast as the ring takes them."""
    load_time: float = 0.0
    load_error: str | None = None
    """The load fails with this message."""
    die_in_load: int | None = None
    """A signal number: the engine kills itself with it while it loads."""
    ignore_sigterm: bool = False
    hang_in_unload: bool = False
    unload_time: float = 0.0
    bytes: int = 0
    """What the ledger is told that this engine holds."""


class LoraAdapter(msgspec.Struct, frozen=True):
    """A GGUF file with a low-rank adaptation of the model's weights."""

    path: str
    scale: float = 1.0


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's engine. ``context`` is tokens per sequence; ``slots`` is sequences at once."""

    model: str
    backend: str
    path: str | None = None
    slots: int = 4
    context: int | None = None
    """None: what the model was trained for, at most 4096."""
    threads: int | None = None
    """None: chosen by the engine so that the front keeps its share of the cores."""
    gpu_layers: int | None = None
    """None: all of them where llama.cpp was built for a GPU, else none."""
    pooling: str | None = None
    """mean, cls or last: make vectors that way, whatever the file says. None: as it says; without a word it generates."""
    lora: tuple[LoraAdapter, ...] = ()
    """llama_cpp only; all are in force at once, each with its scale."""
    kv_type: str = "f16"
    """llama_cpp only: f16, q8_0 or q4_0."""
    flash_attention: bool = True
    """llama_cpp only."""
    mmap: bool = True
    """llama_cpp only. False: the weights are read into memory of the engine's own."""
    speculation: int = 0
    """llama_cpp only: tokens that are guessed ahead by prompt lookup in a step; 0: none."""
    confine: str = "auto"
    """What the engine gives up before it loads: strict, jit, off; auto: strict where its library can live with it."""
    fake: FakeSettings = FakeSettings()


class BackendTraits(NamedTuple):
    """What rooms that never see a backend have to know of it, so that none of them asks for one by its name."""

    package: str | None
    """Whose version a measurement holds for."""
    maps_file: bool
    """Its model's file is mapped (``mmap``), and so in memory once for all engines that map it."""
    offloads: bool
    """To a GPU, where its library was built for one."""
    declares_bytes: bool
    """It needs what its settings say, and nothing has to be guessed."""


BACKENDS = MappingProxyType({
    "llama_cpp": BackendTraits("llama-cpp-python", maps_file=True, offloads=True, declares_bytes=False),
    "mlx": BackendTraits("mlx", maps_file=False, offloads=False, declares_bytes=False),
    "fake": BackendTraits(None, maps_file=False, offloads=False, declares_bytes=True),
})  # fmt: skip
