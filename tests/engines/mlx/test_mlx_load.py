"""Directories that are no models, or broken ones, each end in one line that names what is wrong, and never in a crash."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.errors import LoadFailed
from slimproc.settings import EngineSettings
from tests.mlx_models import mlx_tiny_random


@pytest.fixture
def folder(random_model, tmp_path) -> Path:
    """A whole model, to be broken."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in random_model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def load(path: Path | None, **settings):
    options = {"model": "m", "backend": "mlx", "path": path and str(path), "threads": 1, **settings}
    fractions: list[float] = []
    backend = create(EngineSettings(**options))
    try:
        return backend.load(fractions.append)
    finally:
        backend.close()


def refusal(path: Path | None, **settings) -> str:
    with pytest.raises(LoadFailed) as caught:
        load(path, **settings)
    assert caught.value.permanent
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    return caught.value.message


def without(name: str):
    return lambda folder: (folder / name).unlink()


def config(**changes):
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def content(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def weights(change: Callable[[bytearray], bytes | bytearray]):
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(bytearray(file.read_bytes())))

    return apply


def header(change: Callable[[dict], object]):
    """Rewrite the header of the weights and leave their bytes as they are."""

    def apply(data: bytearray) -> bytes:
        size = struct.unpack_from("<Q", data)[0]
        entries = json.loads(data[8 : 8 + size])
        change(entries)
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return weights(apply)


def tokenizer(change: Callable[[dict], object]):
    def apply(folder: Path) -> None:
        file = folder / "tokenizer.json"
        description = json.loads(file.read_text())
        change(description)
        file.write_text(json.dumps(description))

    return apply


EMBEDDING = "model.embed_tokens.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n"
INDEX = {"weight_map": {EMBEDDING: "model-00001-of-00002.safetensors"}}

BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (without("config.json"), "there is no config.json"),
    "config is not JSON": (content("config.json", b"{"), "config.json: not JSON"),
    "config is not UTF-8": (content("config.json", b"\xff\xfe{}"), "config.json: "),
    "config is a list": (content("config.json", b"[]"), "not a JSON object"),
    "config nested too deeply": (content("config.json", b"[" * 100_000), "config.json: "),
    "config without a kind": (config(model_type=None), "no model_type"),
    "unknown kind": (config(model_type="lxama"), "Model type lxama not supported"),
    "kind that is a path": (config(model_type="../../x"), "not supported"),
    "program of its own": (config(model_file="evil.py"), "model_file"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "absurdly many layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "more layers than weights": (config(num_hidden_layers=3), "Missing 9 parameters: model.layers.2."),
    "fewer layers than weights": (config(num_hidden_layers=1), "not in model: model.layers.1."),
    "0 heads": (config(num_attention_heads=0), "division by zero"),
    "3 heads": (config(num_attention_heads=3), "(48, 64)"),
    "another width": (config(hidden_size=63), "shape"),
    "a width that is text": (config(hidden_size="wide"), "'str'"),
    "another vocabulary": (config(vocab_size=300), "shape"),
    "no epsilon": (config(rms_norm_eps=None), "NoneType"),
    "quantized, it says": (config(quantization={"bits": 4}), "group_size"),
    "no weights": (without("model.safetensors"), "no model*.safetensors"),
    "missing shard": (content("model.safetensors.index.json", json.dumps(INDEX).encode()), "model-00001-of-00002"),
    "LFS pointer": (content("model.safetensors", POINTER), "Git LFS"),
    "weights are empty": (content("model.safetensors", b""), "model.safetensors: it has only 0 bytes"),
    "weights of 3 bytes": (content("model.safetensors", b"abc"), "model.safetensors: it has only 3 bytes"),
    "weights are zeros": (content("model.safetensors", bytes(4096)), "Invalid json header length"),
    "weights are text": (content("model.safetensors", b"<html>404</html>" * 99), "Invalid json header length"),
    "header of 2^62 bytes": (weights(lambda data: struct.pack("<Q", 1 << 62) + data[8:]), "Invalid json header length"),
    "header is not JSON": (weights(lambda data: data[:8] + b"?" + data[9:]), "parse error"),
    "cut in the header": (weights(lambda data: data[:100]), "only 100 bytes"),
    "cut in the middle": (weights(lambda data: data[: len(data) // 2]), "exceeding the size of the file"),
    "last byte missing": (weights(lambda data: data[:-1]), "exceeding the size of the file"),
    "no tensor": (header(dict.clear), "Missing 21 parameters"),
    "one tensor missing": (header(lambda entries: entries.pop(EMBEDDING)), f"Missing 1 parameters: {EMBEDDING}"),
    "unknown dtype": (header(lambda entries: entries[EMBEDDING].update(dtype="Q9")), "unsupported dtype Q9"),
    "huge shape": (header(lambda entries: entries[EMBEDDING].update(shape=[1 << 40, 1 << 40])), "invalid data offsets"),
    "shape without numbers": (
        header(lambda entries: entries[EMBEDDING].update(shape=["a"])),
        "must be number, but is string",
    ),
    "offsets beyond the end": (
        header(lambda entries: entries[EMBEDDING].update(data_offsets=[1 << 60, 1 << 61])),
        "invalid data offsets",
    ),
    "no tokenizer": (without("tokenizer.json"), "no tokenizer.json"),
    "tokenizer is not JSON": (content("tokenizer.json", b"{"), "tokenizer.json: Expecting"),
    "tokenizer is empty JSON": (content("tokenizer.json", b"{}"), "tokenizer.json: Model missing"),
    "tokenizer is a list": (content("tokenizer.json", b"[]"), "tokenizer.json: invalid type: sequence"),
    "tokenizer without a model": (
        tokenizer(lambda description: description.pop("model")),
        "tokenizer.json: Model missing",
    ),
    "tokenizer with broken merges": (
        tokenizer(lambda description: description["model"].update(merges=["x"])),
        "tokenizer.json: Merges",
    ),
    "merges of unknown words": (
        tokenizer(lambda description: description["model"].update(merges=["zz yy"])),
        "`zz` out of vocabulary",
    ),
    "unknown decoder": (tokenizer(lambda description: description.update(decoder={"type": "WordPiece"})), "Decoder"),
    "tokenizer config is a list": (content("tokenizer_config.json", b"[]"), "not a JSON object"),
    "generation config is not JSON": (content("generation_config.json", b"nope"), "generation_config.json: not JSON"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_directory_is_refused_in_one_line(folder, what):
    break_it, words = BROKEN[what]
    break_it(folder)
    message = refusal(folder)
    assert str(folder) in message
    assert words
    assert words in message.replace(str(folder), ""), "also where the path does not happen to say it"


def test_a_gguf_file_is_refused_with_what_is_wanted(random_model):
    assert "wants a directory" in refusal(random_model.with_suffix(".gguf"))


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    assert str(tmp_path / "nothing") in refusal(tmp_path / "nothing")


def test_a_path_is_needed():
    assert "needs a path" in refusal(None)


@pytest.mark.parametrize(
    "settings", [{"slots": 0}, {"slots": 300}, {"context": 3}, {"context": 1 << 40}, {"threads": 0}], ids=str
)
def test_settings_that_make_no_sense_are_refused(random_model, settings):
    (name,) = settings
    assert f"{name} is {settings[name]}" in refusal(random_model, **settings)


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(folder, monkeypatch):
    monkeypatch.setattr("slimproc.engines.mlx.model._physical_bytes", lambda: 1000)
    assert "memory" in refusal(folder)


def test_a_model_without_optional_files_loads(folder):
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    info = load(folder)
    assert (info.chat_template, info.bos_token, info.eos_token) == (None, "", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "from a file"),
        ("tokenizer_config.json", json.dumps({"chat_template": "from a file"})),
        ("chat_template.json", json.dumps({"chat_template": "from a file"})),
        (
            "tokenizer_config.json",
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "x"},
                        {"name": "default", "template": "from a file"},
                    ]
                }
            ),
        ),
    ],
)
def test_a_chat_template_is_found_wherever_it_is_kept(folder, name, text):
    (folder / "tokenizer_config.json").unlink()
    (folder / name).write_text(text)
    assert load(folder).chat_template == "from a file"


def test_the_context_is_the_models_up_to_4096_and_more_where_asked_for_with_a_warning(tmp_path, capfd):
    long = mlx_tiny_random(tmp_path / "long", context=9000)
    assert load(long).context == 4096
    assert load(long, context=6000).context == 6000
    assert "warning" not in capfd.readouterr().err
    assert load(long, context=10_000).context == 10_000
    assert "9000 tokens this model was trained for" in capfd.readouterr().err


def test_what_the_listener_of_progress_raises_comes_out_as_it_is(random_model):
    class GoneError(Exception):
        pass

    def gone(_fraction: float) -> None:
        raise GoneError

    backend = create(EngineSettings(model="m", backend="mlx", path=str(random_model)))
    with pytest.raises(GoneError):
        backend.load(gone)


def test_a_library_that_panics_at_a_file_is_a_load_that_failed(random_model, monkeypatch):
    class PanicException(BaseException):  # pyo3's own name
        pass

    def panic(_text):
        raise PanicException("called unwrap on a None value")

    monkeypatch.setattr("slimproc.engines.mlx.tokenizer._tokenizer", panic)
    assert "called unwrap on a None value" in refusal(random_model)


def test_without_the_library_the_load_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("slimproc.engines.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(LoadFailed, match=r"pip install '\.\[mlx\]'"):
        create(EngineSettings(model="m", backend="mlx"))


def test_importing_the_library_leaves_the_process_as_it_should_be():
    """Checked in a process of its own, since a library is imported only once."""
    program = (
        "import os, resource, sys; limit = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "os.environ['LD_PRELOAD'] = '/a/libopenblas.so.0:/b/theirs.so';"
        "import slimproc.engines.mlx.library as library;"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit, 'mlx-lm sets it';"
        "assert os.environ['HF_HUB_OFFLINE'] == '1';"
        "assert sys.platform != 'linux' or os.environ['MLX_DISABLE_COMPILE'] == '1';"
        "assert sys.platform != 'linux' or os.environ['LD_PRELOAD'] == '/b/theirs.so', 'for children';"
        "print(library.versions())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mlx ")
    assert done.stderr == ""
