"""Loads a model's directory and tries it once, so that whatever is wrong with it comes out as one line while it loads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slimproc.engines.mlx import library
from slimproc.engines.mlx.directory import ModelDirectory
from slimproc.engines.mlx.library import mx
from slimproc.engines.mlx.tokenizer import Vocabulary
from slimproc.engines.panics import is_failure
from slimproc.errors import LoadFailed
from slimproc.ipc.wire import ModelInfo
from slimproc.model_path import resolve
from slimproc.settings import EngineSettings
from slimproc.threads import default_threads, usable_cores

Result = TypeVar("Result")
_DEFAULT_CONTEXT = 4096
_MAX_SLOTS, _MIN_CONTEXT, _MAX_CELLS, _MAX_THREADS = 256, 8, 1 << 30, 512
_PREFIX_SHARE = 8
"""Kept prefixes take at most this part of the machine's memory."""
_TRY_TOKENS = 2


class LoadedModel:
    """A model, its vocabulary, and what was learned of them by trying."""

    def __init__(self, settings: EngineSettings, progress: Callable[[float], None]) -> None:
        """Raises LoadFailed; whatever ``progress`` raises ends the load and comes out as it is."""
        _check_settings(settings)
        if settings.path is None:
            raise LoadFailed("mlx needs a path", permanent=True)
        progress(0.0)
        self._directory = directory = ModelDirectory(resolve(settings.path))
        _check_memory(directory)
        progress(0.05)
        self.threads = settings.threads or default_threads(usable_cores())
        library.limit_threads(self.threads)
        self.vocabulary: Vocabulary = self._attempt(lambda: Vocabulary(directory), directory.path / "tokenizer.json")
        progress(0.15)
        model = self._attempt(lambda: library.load_model(directory.path)[0], directory.path)
        progress(0.9)
        self.network = Float32Logits(model)
        self._attempt(self._try, directory.path)
        self._weights = library.parameters(model)
        self.slots = settings.slots
        self.context_tokens = _context_tokens(settings, directory.trained_context)
        running = self.slots * self.context_tokens * self.token_bytes
        self.prefix_bytes = min(running, _physical_bytes() // _PREFIX_SHARE)
        """As much as the running sequences may take themselves, on a machine that has it."""
        progress(1.0)

    def new_cache(self) -> list[Any]:
        """An empty KV cache for one sequence, a part for each layer."""
        cache: list[Any] = library.make_prompt_cache(self.network.model)
        return cache

    def info(self) -> ModelInfo:
        dtypes: Counter[str] = Counter()
        for array in self._weights:
            dtypes[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
        return ModelInfo(
            context=self.context_tokens,
            slots=self.slots,
            vocab_size=self.vocabulary.size,
            chat_template=self._directory.chat_template(),
            bos_token=self.vocabulary.bos_text,
            eos_token=self.vocabulary.eos_text,
            control_tokens=self.vocabulary.control_texts,
            details={
                "description": str(self._directory.config["model_type"]),
                "parameters": sum(array.size for array in self._weights),
                "size_bytes": sum(array.nbytes for array in self._weights),
                "dtype": dtypes.most_common(1)[0][0],
                "kv_bytes": self.slots * self.context_tokens * self.token_bytes,
                "prefix_cache_bytes": self.prefix_bytes,
                "trained_context": self._directory.trained_context or 0,
                "threads": self.threads,
                "blas": library.blas(),
                "versions": library.versions(),
            },
        )

    def _try(self) -> None:
        """One small step. Weights that do not fit together are found here, and the sizes that only the model knows."""
        cache = self.new_cache()
        if not all(hasattr(layer, "merge") for layer in cache):
            raise ValueError(f"a model of the kind {self._directory.config['model_type']!r} cannot run in a batch")
        logits = self.network(mx.zeros((1, _TRY_TOKENS), mx.int32), cache=cache)
        mx.eval(logits)
        if logits.ndim != 3 or logits.shape[:2] != (1, _TRY_TOKENS):
            raise ValueError(f"its logits have the shape {logits.shape}")
        self.vocabulary.size = logits.shape[-1]
        self.token_bytes = sum(map(_token_bytes, cache))
        """Bytes of KV cache for one token of one sequence."""
        self.rewinds: bool = library.can_trim(cache)
        """Whether a sequence's last tokens can be taken back; a recurrent state knows no past."""

    @staticmethod
    def _attempt(work: Callable[[], Result], path: Path) -> Result:
        """Anything that goes wrong in the libraries is the fault of what lies at ``path``. Only memory can come back."""
        try:
            return work()
        except BaseException as error:
            if not is_failure(error):
                raise
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if isinstance(error, (KeyError, AttributeError, TypeError, ZeroDivisionError)):
                reason = f"{type(error).__name__}: {reason}"  # their texts alone say little
            scarce = isinstance(error, MemoryError) or "allocate" in reason
            raise LoadFailed(f"{path}: {reason}", permanent=not scarce, scarce=scarce) from error


class Float32Logits:
    """The model as BatchGenerator calls it. Half-precision logits would make ties, and numpy cannot read bfloat16."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Any, cache: list[Any]) -> Any:
        return self.model(tokens, cache=cache).astype(mx.float32)


def _token_bytes(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return 0 if keys is None else layer.nbytes // keys.shape[2]


def _check_settings(settings: EngineSettings) -> None:
    limits: list[tuple[str, int | None, int, int]] = [
        ("slots", settings.slots, 1, _MAX_SLOTS),
        ("context", settings.context, _MIN_CONTEXT, _MAX_CELLS // max(1, settings.slots)),
        ("threads", settings.threads, 1, _MAX_THREADS),
    ]
    for name, value, low, high in limits:
        if value is not None and not low <= value <= high:
            raise LoadFailed(f"{name} is {value}; it must be between {low} and {high}", permanent=True)


def _check_memory(directory: ModelDirectory) -> None:
    physical = _physical_bytes()
    if directory.weight_bytes > physical:
        raise LoadFailed(
            f"{directory.path}: its weights are {directory.weight_bytes >> 20} MiB;"
            f" this machine has {physical >> 20} MiB of memory",
            permanent=True,
        )


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _context_tokens(settings: EngineSettings, trained: int | None) -> int:
    if settings.context is None:
        return max(min(trained or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT), _MIN_CONTEXT)
    if trained is not None and trained < settings.context:
        print(  # noqa: T201  # stderr is this process's log
            f"warning: context {settings.context} is more than the {trained} tokens this model was trained for",
            file=sys.stderr,
            flush=True,
        )
    return settings.context
