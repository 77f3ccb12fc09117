"""What an engine is started with. The configuration fills it, the wire carries it, a backend reads it.

A leaf of its own because both sides of the process border need these types and neither may import the other.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

OnCrash = Literal["fail", "resume"]
"""What a stream does that has delivered text and whose engine dies: it ends with an error, or goes on in another one."""


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
    flash_attention: bool | None = None
    """llama_cpp only. None: where it is faster or ``kv_type`` needs it."""
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
    own_keys: frozenset[str] = frozenset()
    """Settings of a model that no other backend takes."""
    has_file: bool = True
    """Its model is a file or a directory (``path``)."""
    maps_file: bool = False
    """Its model's file is mapped (``mmap``), and so in memory once for all engines that map it."""
    offloads: bool = False
    """To a GPU, where its library was built for one."""
    module: str = ""
    """What offloads: the module in whose folder the libraries for GPUs would be. It is looked at and never imported."""
    module_variable: str = ""
    """Names the folder that it takes its libraries from instead, in the environment."""
    environment: tuple[tuple[str, str], ...] = ()
    """What its process is started with unless something else is given: later is too late."""
    slow_blas: bool = False
    """The BLAS in its package for Linux is the reference one: with it a prompt takes ten times as long."""
    declares_bytes: bool = False
    """It needs what its settings say, and nothing has to be guessed."""
    scripted: bool = False
    """It computes nothing, and answers as its prompt tells it to."""


BACKENDS = MappingProxyType({
    "llama_cpp": BackendTraits(
        "llama-cpp-python",
        own_keys=frozenset({"pooling", "lora", "kv_type", "flash_attention", "mmap", "speculation"}),
        maps_file=True,
        offloads=True,
        module="llama_cpp",
        module_variable="LLAMA_CPP_LIB_PATH",
        # NumPy only samples there. Starting its BLAS's threads is a quarter of what importing it takes.
        environment=(("OPENBLAS_NUM_THREADS", "1"),),
    ),
    "mlx": BackendTraits("mlx", slow_blas=True),
    "fake": BackendTraits(
        None, own_keys=frozenset({"fake"}), has_file=False, declares_bytes=True, scripted=True
    ),
})  # fmt: skip
