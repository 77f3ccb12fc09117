"""A model's directory: which of its files are there, and what the small JSON ones say. Weights are left to mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from slimproc.errors import LoadFailed

_MOST_LAYERS = 4096
"""A config.json that asks for more is broken, and building so many would take the memory before anything is compared."""
_MOST_JSON = 1 << 28
_LENGTH = 8
"""Bytes that stand before the header of a file of weights. Of fewer, mlx does not say which file has them."""


class ModelDirectory:
    """What a directory holds, checked. Raises LoadFailed (permanent) with one line naming the file that is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            _fail(
                path,
                "mlx wants a directory with config.json, model*.safetensors and tokenizer.json, and this is a file",
            )
        self.config = self._object("config.json")
        self._check_config()
        self.weights = self._weights()
        if not (path / "tokenizer.json").is_file():
            _fail(path, "there is no tokenizer.json (other kinds of tokenizers have to be converted first)")
        self.tokenizer_config = self._object("tokenizer_config.json", required=False)
        self.generation_config = self._object("generation_config.json", required=False)

    @property
    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.weights)

    @property
    def trained_context(self) -> int | None:
        """Tokens, where the configuration says so."""
        value = self.text_value("max_position_embeddings")
        return value if isinstance(value, int) and value > 0 else None

    @property
    def end_ids(self) -> list[int]:
        """The ids by which the configurations say that the model ends its text."""
        found: list[int] = []
        for value in (self.generation_config.get("eos_token_id"), self.text_value("eos_token_id")):
            found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
        return found

    def text_value(self, key: str) -> Any:
        """A value of the configuration; models that also see keep the language model's apart."""
        inner = self.config.get("text_config")
        if key not in self.config and isinstance(inner, dict):
            return inner.get(key)
        return self.config.get(key)

    def token_text(self, name: str) -> str:
        """``bos_token`` or ``eos_token`` as the tokenizer's configuration writes it; empty where there is none."""
        value = self.tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else ""

    def chat_template(self) -> str | None:
        """The model's own template: a file of its own, or in the tokenizer's configuration (of several, the default)."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                _fail(file, _reason(error))
        value = self.tokenizer_config.get("chat_template")
        if value is None:
            value = self._object("chat_template.json", required=False).get("chat_template")
        if isinstance(value, list):
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            value = named.get("default")
        return value if isinstance(value, str) else None

    def _check_config(self) -> None:
        file = self.path / "config.json"
        if not isinstance(self.config.get("model_type"), str):
            _fail(file, "it names no model_type")
        if self.config.get("model_file") is not None:
            _fail(file, "it wants to run a program of its own (model_file), which is not allowed")
        layers = self.text_value("num_hidden_layers")
        if isinstance(layers, int) and not 0 < layers <= _MOST_LAYERS:
            _fail(file, f"num_hidden_layers is {layers}")

    def _weights(self) -> list[Path]:
        files = sorted(self.path.glob("model*.safetensors"))
        index = self._object("model.safetensors.index.json", required=False).get("weight_map")
        wanted = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
        for name in wanted:
            if not (self.path / name).is_file():
                _fail(self.path, f"there is no {name}, which model.safetensors.index.json names")
        if not files:
            _fail(self.path, "there is no model*.safetensors")
        for file in files:
            try:
                with file.open("rb") as opened:
                    head = opened.read(64)
            except OSError as error:
                _fail(file, _reason(error))
            if head.startswith(b"version https://git-lfs"):
                _fail(file, "this is a pointer of Git LFS, not the weights; fetch them with git lfs pull")
            if len(head) <= _LENGTH:
                _fail(file, f"it has only {len(head)} bytes, an incomplete download?")
        return files

    def _object(self, name: str, *, required: bool = True) -> dict[str, Any]:
        file = self.path / name
        if not required and not file.is_file():
            return {}
        try:
            if file.stat().st_size > _MOST_JSON:
                _fail(file, "too large")
            value = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            _fail(self.path, f"there is no {name}")
        except (OSError, ValueError, RecursionError) as error:
            _fail(file, _reason(error))
        if not isinstance(value, dict):
            _fail(file, "it is not a JSON object")
        return value


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)


def _fail(path: Path, reason: str) -> NoReturn:
    raise LoadFailed(f"{path}: {reason}", permanent=True)
