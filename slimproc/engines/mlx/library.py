"""mlx and mlx-lm, imported with what they must be told first. Everything else in this folder reaches them through here.

Typed as Any: they are there only where they are installed, and mlx-lm has no types.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import resource
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # a model's path is a directory here; nothing is ever looked for elsewhere
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it says at every import that there is no PyTorch
if sys.platform == "linux":
    # On CPUs MLX would run g++ on first use and load the result from a directory with a name that anyone can guess,
    # and break where the compiler does. Without it the same tokens come as fast.
    os.environ["MLX_DISABLE_COMPILE"] = "1"
    # OpenBLAS was preloaded for us. The checker of grammars, our child, forks and must have one thread only.
    preloaded = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name and "openblas" not in name]
    os.environ["LD_PRELOAD"] = ":".join(preloaded)


def _import() -> tuple[Any, Any, Any, Any, Any]:
    set_limit = resource.setrlimit
    # mlx_lm.utils sets this process's limit of open files when it is imported: lower than it may be, for good, and with
    # an exception where the hard limit is lower still.
    resource.setrlimit = lambda *_: None
    try:
        names = ("mlx.core", "mlx.utils", "mlx_lm.generate", "mlx_lm.models.cache", "mlx_lm.utils")
        core, trees, generate, cache, utils = map(importlib.import_module, names)
    except (OSError, RuntimeError) as error:  # a shared library is missing, or there is no device
        raise ImportError(str(error)) from error
    finally:
        resource.setrlimit = set_limit
    return core, trees, generate, cache, utils


mx, _trees, _generate, _cache, _utils = _import()
tokenizers: Any = importlib.import_module("tokenizers")
BatchGenerator: Any = _generate.BatchGenerator
make_prompt_cache: Any = _cache.make_prompt_cache
can_trim: Any = _cache.can_trim_prompt_cache
trim: Any = _cache.trim_prompt_cache
load_model: Any = _utils.load_model


def parameters(model: Any) -> list[Any]:
    """A model's weights, each an array."""
    return [array for _, array in _trees.tree_flatten(model.parameters())]


def versions() -> str:
    """For people."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))


def blas() -> str:
    """What multiplies matrices: the GPU, or the BLAS library that this process ended up with."""
    if mx.default_device() == mx.gpu:
        return "gpu"
    if sys.platform == "darwin":
        return "accelerate"
    try:
        mapped = "openblas" in Path("/proc/self/maps").read_text("utf-8", "replace")
    except OSError:
        mapped = False
    return "openblas" if mapped and _openblas() is not None else "bundled (slow)"


def limit_threads(count: int) -> None:
    """Let OpenBLAS use so many threads. MLX's own kernels use one on a CPU, and GPUs have no such number."""
    set_threads = _openblas()
    if set_threads is not None:
        set_threads(count)


def _openblas() -> Any:
    """OpenBLAS's setter of threads, where it was preloaded: only then is it the one that MLX calls."""
    return getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
