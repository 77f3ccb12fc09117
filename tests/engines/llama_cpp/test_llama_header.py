"""A file that is no model, or not all of one, is refused in one line that says what it is."""

from __future__ import annotations

import contextlib
import os
import struct

import gguf
import pytest

from slimproc.engines.llama_cpp.header import TENSOR_BLOCKS, check_file
from slimproc.errors import LoadFailed
from tests.models import tiny_random


def refusal(path) -> str:
    with pytest.raises(LoadFailed) as failure:
        check_file(path)
    assert failure.value.permanent
    assert "\n" not in failure.value.message
    assert str(path.parent) in failure.value.message or "is broken" in failure.value.message
    return failure.value.message


@pytest.fixture
def good(models):
    return models / "tiny.gguf"


def test_a_whole_file_passes_and_its_keys_are_read(good):
    header = check_file(good)
    assert header.values["general.architecture"] == "llama"
    assert header.values["llama.block_count"] == 2
    assert header.values["tokenizer.ggml.add_bos_token"] is False
    assert header.needed == good.stat().st_size


def test_every_cut_of_a_file_is_refused(good, tmp_path):
    path = tmp_path / "model.gguf"
    data = good.read_bytes()
    begin = gguf.GGUFReader(good).data_offset
    for length in [*range(0, begin, 97), begin, begin + 1, len(data) - 64]:
        path.write_bytes(data[:length])
        refusal(path)


def test_no_byte_of_the_header_makes_it_raise_anything_else(good, tmp_path):
    path = tmp_path / "model.gguf"
    data = good.read_bytes()
    begin = gguf.GGUFReader(good).data_offset
    for at in range(0, begin, 41):
        for byte in (0, 0xFF):
            path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
            with contextlib.suppress(LoadFailed):
                check_file(path)


def test_a_path_that_is_no_file_is_named_for_what_it_is(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    assert "is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(tmp_path / "pipe")


def test_a_file_without_permission_is_named(good, tmp_path, monkeypatch):
    def denied(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", denied)  # file modes do not stop root, who runs tests in containers
    assert "Permission denied" in refusal(good)


# --- shards -----------------------------------------------------------------------------------------------------


def write_shard(path, good, number, count):
    """``good`` with the two keys of a shard; llama.cpp is not asked about it here."""
    data = good.read_bytes()
    (keys,) = struct.unpack_from("<Q", data, 16)
    extra = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, value)
        for key, value in ((b"split.no", number), (b"split.count", count))
    )
    changed = data[:16] + struct.pack("<Q", keys + 2) + data[24:]
    path.write_bytes(changed[:24] + extra + changed[24:] + bytes(64))


def test_a_missing_shard_is_named(good, tmp_path):
    write_shard(tmp_path / "m-00001-of-00003.gguf", good, 0, 3)
    write_shard(tmp_path / "m-00002-of-00003.gguf", good, 1, 3)
    assert "shard 3 of 3 is missing" in refusal(tmp_path / "m-00001-of-00003.gguf")


def test_a_shard_that_is_cut_off_is_named(good, tmp_path):
    write_shard(tmp_path / "m-00001-of-00002.gguf", good, 0, 2)
    second = tmp_path / "m-00002-of-00002.gguf"
    write_shard(second, good, 1, 2)
    second.write_bytes(second.read_bytes()[:-1000])
    message = refusal(tmp_path / "m-00001-of-00002.gguf")
    assert str(second) in message
    assert "shorter" in message


@pytest.mark.parametrize(("number", "count"), [(2, 3), (0, 3), (1, 2)])
def test_a_shard_that_is_another_one_than_its_name_says_is_refused(good, tmp_path, number, count):
    for place in range(3):
        write_shard(tmp_path / f"m-0000{place + 1}-of-00003.gguf", good, place, 3)
    wrong = tmp_path / "m-00002-of-00003.gguf"
    write_shard(wrong, good, number, count)
    assert f"{wrong} is named like shard 2 of 3, and its header says otherwise" in refusal(
        tmp_path / "m-00001-of-00003.gguf"
    )


def test_a_whole_model_among_shards_is_refused(good, tmp_path):
    write_shard(tmp_path / "m-00001-of-00002.gguf", good, 0, 2)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(good.read_bytes())
    assert "named like shard 2 of 2" in refusal(tmp_path / "m-00001-of-00002.gguf")


def test_the_tensors_of_all_shards_are_the_models(good, tmp_path):
    for place in range(2):
        write_shard(tmp_path / f"m-0000{place + 1}-of-00002.gguf", good, place, 2)
    other = tiny_random(tmp_path / "other.gguf", layers=3)
    write_shard(tmp_path / "m-00002-of-00002.gguf", other, 1, 2)
    assert "blk.2.ffn_up.weight" in check_file(tmp_path / "m-00001-of-00002.gguf").tensors


def test_another_shard_than_the_first_is_refused(good, tmp_path):
    write_shard(tmp_path / "m-00002-of-00003.gguf", good, 1, 3)
    assert "shard 2 of 3: give the path of the first" in refusal(tmp_path / "m-00002-of-00003.gguf")


def test_shards_beside_a_symlink_are_found_by_the_links_name(good, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number in (0, 1):
        write_shard(blobs / f"{number}abc", good, number, 2)
        (snapshot / f"m-0000{number + 1}-of-00002.gguf").symlink_to(blobs / f"{number}abc")
    assert check_file(snapshot / "m-00001-of-00002.gguf").values["split.count"] == 2


def test_block_sizes_are_those_of_the_reference_library():
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: size for kind, size in TENSOR_BLOCKS.items() if kind in sizes} == {
        kind: size for kind, size in sizes.items() if kind in TENSOR_BLOCKS
    }


def test_a_large_vocabulary_is_stepped_over(tmp_path):
    assert check_file(tiny_random(tmp_path / "m.gguf")).values["tokenizer.ggml.tokens"] is not None
    path = tmp_path / "words.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list([f"w{number}" for number in range(5000)])
    writer.add_name("after")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = check_file(path).values
    assert values["tokenizer.ggml.tokens"] is None
    assert values["general.name"] == "after"
