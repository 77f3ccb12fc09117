"""Loads a model and makes its context: checks settings and file first, so that native code meets only sane values."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from slimproc.engines.llama_cpp.header import Header, check_file
from slimproc.engines.llama_cpp.keys import check_keys
from slimproc.engines.llama_cpp.library import lib, native_log
from slimproc.engines.llama_cpp.limits import KV_TYPES, check_settings, context_tokens, kv_bytes_per_token, warn
from slimproc.engines.llama_cpp.lora import apply_adapters, check_adapters, describe
from slimproc.engines.llama_cpp.pooling import Pooling, capabilities, must_be_told, pooling_of
from slimproc.engines.llama_cpp.vocabulary import Vocabulary
from slimproc.engines.prompt_scores import SCORED_ROWS
from slimproc.errors import LoadFailed
from slimproc.ipc.wire import ModelInfo
from slimproc.model_path import resolve
from slimproc.settings import EngineSettings
from slimproc.threads import default_threads, usable_cores

BATCH = 512
"""Tokens that one call of llama_decode takes (n_batch and n_ubatch): beyond it CPUs gain nothing, and nothing can be
cancelled meanwhile."""
_PLAIN_BATCH = 128
"""Tokens of one pass (n_ubatch) without flash attention, whose scores take so many rows of the whole context."""
TEXTS = 64
"""Sequences that a model which makes vectors takes at least at once: they cost it no memory, and short texts share a call."""
_POSITIONS = "position_embd.weight"
"""Models with a table of positions have none beyond those that they were trained for: llama.cpp ends the process there."""
_CELLS = 256
"""llama.cpp rounds a slot's KV cells to a multiple of it, and warns if it has to."""


class LoadedModel:
    """A model and its one context. ``close`` frees both; nothing of it may be used afterwards."""

    def __init__(self, settings: EngineSettings, progress: Callable[[float], None]) -> None:
        """Raises LoadFailed; whatever ``progress`` raises ends the load and comes out as it is."""
        check_settings(settings)
        if settings.path is None:
            raise LoadFailed("llama_cpp needs a path", permanent=True)
        path = resolve(settings.path)
        header = check_file(path)
        check_keys(path, header)
        adapters = check_adapters(settings.lora, header)
        self._settings = settings
        self.pooling: Pooling | None = None
        self.slots = settings.slots
        self.threads = settings.threads or default_threads(usable_cores())
        self._model: Any = None
        self.context: Any = None
        try:
            self._model = _load(str(path), settings, progress)
            self.pooling = pooling_of(self._model, header, settings.pooling)
            _check_vocabulary(self._model)
            pre = str(header.values.get("tokenizer.ggml.pre", ""))
            self.vocabulary = Vocabulary(lib.llama_model_get_vocab(self._model), pre)
            trained = lib.llama_model_n_ctx_train(self._model)
            self.context_tokens = context_tokens(
                settings, trained, bounded=self.pooling is not None or _POSITIONS in header.tensors
            )
            if self.pooling is not None:
                self.slots = max(self.slots, TEXTS)
            self._kv_bytes = self._check_memory(header)
            self._make_context(header)
            apply_adapters(self._model, self.context, adapters)
        except BaseException:
            self.close()
            raise
        self.memory: Any = lib.llama_get_memory(self.context)
        self.rewinds = not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))
        """Whether a sequence's last tokens can be taken back; a recurrent state knows no past."""
        self.speculation = settings.speculation if self.rewinds and self.pooling is None else 0
        """Tokens guessed ahead in a step. A wrong guess must be taken back."""
        if self.speculation != settings.speculation:
            warn("speculation is of no use to this model, and is off")

    def info(self) -> ModelInfo:
        template = lib.llama_model_chat_template(self._model, None)
        return ModelInfo(
            context=self.context_tokens,
            slots=self.slots,
            vocab_size=self.vocabulary.size,
            chat_template=template.decode("utf-8", "replace") if template else None,
            bos_token=self.vocabulary.bos_text,
            eos_token=self.vocabulary.eos_text,
            control_tokens=self.vocabulary.control_texts,
            capabilities=capabilities(self.pooling),
            embedding_size=self.vector_size if self.pooling not in (None, Pooling.RANK) else 0,
            details={
                "description": _description(self._model),
                "parameters": lib.llama_model_n_params(self._model),
                "size_bytes": lib.llama_model_size(self._model),
                "kv_bytes": self._kv_bytes if self.memory else 0,
                "trained_context": lib.llama_model_n_ctx_train(self._model),
                "threads": self.threads,
                "gpu_offload": bool(lib.llama_supports_gpu_offload()),
                "gpu_layers": self._gpu_layers,
                "mmap": self._settings.mmap and bool(lib.llama_supports_mmap()),
                "flash_attention": self.flash_attention,
                "kv_type": self._settings.kv_type if self.memory else "none",
                "lora": describe(self._settings.lora),
                "speculation": self.speculation,
            },
        )

    @property
    def _gpu_layers(self) -> int:
        """Layers that are on a GPU, the one after the last among them. Without a word it is all, where there is one."""
        if not lib.llama_supports_gpu_offload():
            return 0
        layers = int(lib.llama_model_n_layer(self._model)) + 1
        wanted = self._settings.gpu_layers
        return layers if wanted is None else min(wanted, layers)

    @property
    def flash_attention(self) -> bool:
        """On a CPU plain attention is twice as fast for single tokens behind a long text, and for less than a block of
        64, which flash attention takes row by row.
        """
        wanted = self._settings.flash_attention
        if wanted is not None:
            return wanted
        return self._gpu_layers > 0 or self._settings.kv_type != "f16" or self.pooling is not None

    @property
    def vector_size(self) -> int:
        """Values of a vector."""
        return int(lib.llama_model_n_embd_out(self._model))

    @property
    def rank_values(self) -> int:
        """Values that the head for ranking gives."""
        return int(lib.llama_model_n_cls_out(self._model))

    @property
    def rank_template(self) -> str | None:
        """How the model wants a query and a document put together, where its file says that."""
        template = lib.llama_model_chat_template(self._model, b"rerank")
        return template.decode("utf-8", "replace") if template else None

    @property
    def batch_tokens(self) -> int:
        """Tokens that one call takes. A text is read in one call, however long it is."""
        if self.pooling is None:
            return BATCH
        # A whole number for each sequence: llama.cpp tries its graph with equal shares, and aborts if they are not.
        return -(-max(BATCH, self.context_tokens) // self.slots) * self.slots

    def close(self) -> None:
        if self.context is not None:
            lib.llama_free(self.context)
            self.context = None
        if self._model is not None:
            lib.llama_model_free(self._model)
            self._model = None

    def _check_memory(self, header: Header) -> int:
        """Bytes of KV cache for all slots. Raises LoadFailed when this machine cannot hold them at all.

        They are touched while loading, and what the kernel then does to a process without memory nobody would
        understand. On a GPU the cache lies elsewhere, and llama.cpp says itself when that is full.
        """
        tokens = self.slots * self.context_tokens if self.pooling is None else self.batch_tokens
        kv_bytes = tokens * kv_bytes_per_token(self._model, header, self._settings.kv_type)
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if kv_bytes > physical and not lib.llama_supports_gpu_offload():
            raise LoadFailed(
                f"{self.slots} slots with {self.context_tokens} tokens of context need {kv_bytes >> 20} MiB"
                f" of KV cache; this machine has {physical >> 20} MiB of memory",
                permanent=True,
            )
        return kv_bytes

    def _make_context(self, header: Header) -> None:
        params = lib.llama_context_default_params()
        params.n_seq_max = self.slots
        params.n_batch = params.n_ubatch = self.batch_tokens
        if self.pooling is None:
            params.n_ctx = self.slots * _in_cells(self.context_tokens)
            # Else there is room for BATCH rows of logits: 100 MB at 49,152 tokens.
            params.n_outputs_max = min(self.slots * (1 + self._settings.speculation) + SCORED_ROWS, BATCH)
            params.kv_unified = False
        else:
            params.n_ctx = _in_cells(self.batch_tokens)
            params.embeddings = True
            params.pooling_type = int(self.pooling)
            params.kv_unified = True
        params.n_threads = params.n_threads_batch = self.threads
        flash = self.flash_attention
        if not flash:
            params.n_ubatch = _PLAIN_BATCH
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = KV_TYPES[self._settings.kv_type].number
        params.swa_full = True  # a window's cache keeps no old tokens, so no prefix could be reused
        native_log.begin()
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            cause = native_log.cause("llama.cpp could not make a context (out of memory?)")
            raise LoadFailed(cause, permanent=not _is_scarce(cause), scarce=_is_scarce(cause))
        self.context = context
        if self.pooling is None and not lib.llama_get_memory(context):
            raise must_be_told(header.values.get("general.architecture", "?"))
        if lib.llama_n_ctx_seq(context) < self.context_tokens:
            raise LoadFailed(f"llama.cpp gave a slot only {lib.llama_n_ctx_seq(context)} tokens of context")


def _load(path: str, settings: EngineSettings, progress: Callable[[float], None]) -> Any:
    failure: BaseException | None = None

    def report(fraction: float, _user_data: object) -> bool:
        nonlocal failure
        try:
            progress(fraction)
        except BaseException as error:  # noqa: BLE001  # it must not unwind through C++; it is raised again below
            failure = error
        return failure is None

    params = lib.llama_model_default_params()
    if settings.gpu_layers is not None:
        params.n_gpu_layers = settings.gpu_layers
    if not settings.mmap:
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    # GCC's _tile_loadconfig tells the optimizer that it reads 8 of 64 bytes, so ggml's AMX kernels load a tile
    # configuration that was never written, and die of it. They are reached through the extra buffer types only.
    params.use_extra_bufts = b"AMX_INT8 = 1" not in lib.llama_print_system_info()
    callback = lib.llama_progress_callback(report)
    params.progress_callback = callback
    native_log.begin()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if failure is not None:
        if model:
            lib.llama_model_free(model)
        raise failure
    if not model:
        cause = native_log.cause("llama.cpp refused it without a word")
        raise LoadFailed(f"{path}: {cause}", permanent=not _is_scarce(cause), scarce=_is_scarce(cause))
    return model


def _is_scarce(cause: str) -> bool:
    """Memory can come back; a file stays as it is."""
    return "alloc" in cause or "memory" in cause


def _check_vocabulary(model: Any) -> None:
    vocabulary = lib.llama_model_get_vocab(model)
    if lib.llama_vocab_type(vocabulary) == lib.LLAMA_VOCAB_TYPE_NONE or lib.llama_vocab_n_tokens(vocabulary) <= 0:
        raise LoadFailed("the model has no vocabulary", permanent=True)


def _in_cells(tokens: int) -> int:
    return -(-tokens // _CELLS) * _CELLS


def _description(model: Any) -> str:
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")
