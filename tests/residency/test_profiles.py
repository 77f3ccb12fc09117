"""What was measured is found again, for the same file and settings only; a bad file costs nothing but that."""

import pytest

from slimproc.config import ModelConfig
from slimproc.residency.profiles import ProfileStore, profile_key
from slimproc.residency.views import Claim
from slimproc.settings import LoraAdapter


def test_what_is_put_is_there_for_the_next_server(tmp_path):
    ProfileStore(tmp_path / "new").put("key", "m", Claim(30, 20))

    store = ProfileStore(tmp_path / "new")

    assert store.get("key") == (30, 20)
    assert store.get("another") is None
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["profiles.json"]


def test_a_life_that_needed_little_does_not_make_an_earlier_one_forgotten(tmp_path):
    store = ProfileStore(tmp_path)
    store.put("key", "m", Claim(30, 20))
    store.put("key", "m", Claim(10, 25))

    assert ProfileStore(tmp_path).get("key") == (30, 25)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"format": 1, "profiles": {"key": {"model": "m", "load_peak": -1, "run_peak": 1}}}',
        b'{"format": 1, "profiles": {"key": {"model": "m", "load_peak": 1e30, "run_peak": 1}}}',
        b'{"format": 1, "profiles": {"key": {"model": "m", "load_peak": 99999999999999999999, "run_peak": 1}}}',
        b'{"format": 2, "profiles": {"key": {"model": "m", "load_peak": 1, "run_peak": 1}}}',
        b" " * ((1 << 20) + 1),
    ],
    ids=["empty", "cut", "not text", "a list", "deep", "negative", "a float", "huge", "a later format", "too large"],
)
def test_a_file_that_cannot_be_read_is_as_none_and_is_replaced(tmp_path, content):
    (tmp_path / "profiles.json").write_bytes(content)

    store = ProfileStore(tmp_path)
    assert store.get("key") is None
    store.put("key", "m", Claim(3, 2))

    assert ProfileStore(tmp_path).get("key") == (3, 2)


def test_a_place_that_cannot_be_written_costs_only_the_next_servers_knowledge(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = ProfileStore(tmp_path / "file")

    store.put("key", "m", Claim(3, 2))

    assert store.get("key") == (3, 2)
    assert "a measured profile could not be kept" in caplog.text


def test_the_key_changes_with_what_costs_memory_and_with_nothing_else(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")

    def key(kind="host", **changes):
        return profile_key(ModelConfig(**{"name": "m", "backend": "llama_cpp", "path": str(file), **changes}), kind, {})

    first = key()
    same = [key(name="another"), key(threads=3), key(confine="off"), key(ttl=3.0), key(replicas=2)]
    other = [
        key("gpu"), key(slots=9), key(context=99), key(kv_type="q8_0"), key(mmap=False), key(gpu_layers=3),
        key(lora=(LoraAdapter("/x"),)), key(flash_attention=False), key(speculation=2), key(pooling="mean"),
    ]  # fmt: skip
    file.write_bytes(b"GGUF2")
    other.append(key())

    assert {first} == set(same)
    assert len({first, *other}) == len(other) + 1
    file.unlink()
    assert key() is None
    assert profile_key(ModelConfig(name="f", backend="fake"), "host", {}) is None
