"""Settings that native code is given as they are: the KV's type, flash attention, mmap, GPU layers; and OpenMP's own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.errors import LoadFailed
from tests.engines.conformance import PROMPTS
from tests.models import tiny_random


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model whose heads are as wide as a block of quantized KV."""
    return tiny_random(tmp_path_factory.mktemp("wide") / "wide.gguf", size=128)


@pytest.mark.parametrize(("kv_type", "share"), [("f16", 1.0), ("q8_0", 34 / 64), ("q4_0", 18 / 64)])
def test_a_smaller_kv_type_takes_fewer_bytes_and_still_answers(open_engine, wide, kv_type, share):
    engine = open_engine(wide, kv_type=kv_type, slots=2)
    assert engine.info.details["kv_bytes"] == int(2 * 256 * 2 * 2 * 2 * 32 * 2 * share)
    assert engine.info.details["kv_type"] == kv_type
    assert engine.info.details["flash_attention"] is (kv_type != "f16"), "where it is needed"
    alone = [open_engine(wide, kv_type=kv_type, slots=1).complete(prompt, 16).text for prompt in PROMPTS[:2]]
    together = [engine.submit(prompt, 16) for prompt in PROMPTS[:2]]
    engine.finish()
    assert [generation.text for generation in together] == alone
    again = engine.complete(PROMPTS[0], 16)
    assert again.text == alone[0]
    assert again.usage.cached_tokens


def test_what_cannot_go_together_or_is_unknown_is_refused_by_name(settings, wide):
    for changes, words in [
        ({"kv_type": "q8_0", "flash_attention": False}, "kv_type q8_0 needs flash_attention"),
        ({"kv_type": "q3_x"}, "kv_type is 'q3_x'; it must be f16, q8_0, q4_0"),
        ({"speculation": -1}, "speculation is -1"),
        ({"speculation": 17}, "speculation is 17"),
        # llama.cpp says why only where nobody has turned its log off in this process before.
        ({"path": "tiny.gguf", "kv_type": "q8_0"}, ("does not divide n_embd_head_k=16", "could not make a context")),
    ]:
        with pytest.raises(LoadFailed) as failure:
            create(settings(**{"path": wide, **changes})).load(lambda _fraction: None)
        assert any(each in failure.value.message for each in ([words] if isinstance(words, str) else words))
        assert failure.value.permanent or not isinstance(words, str)


def test_flash_attention_and_mmap_can_be_switched_and_the_details_say_it(open_engine):
    plain = open_engine()
    expected = [plain.complete(prompt, 16).text for prompt in PROMPTS]
    other = open_engine(flash_attention=True, mmap=False)
    assert [other.complete(prompt, 16).text for prompt in PROMPTS] == expected
    names = ("flash_attention", "mmap", "gpu_layers", "speculation")
    assert [plain.info.details[name] for name in names] == [False, True, 0, 0]
    assert [other.info.details[name] for name in names] == [True, False, 0, 0]


def test_without_mmap_nothing_is_left_mapped_that_another_could_cut_short(open_engine, tmp_path):
    for name, changes in (("mapped.gguf", {}), ("read.gguf", {"mmap": False})):
        path = tiny_random(tmp_path / name)
        open_engine(path, **changes)
        assert (str(path) in Path("/proc/self/maps").read_text()) is (not changes)


@pytest.mark.parametrize(
    ("changes", "layers", "flash"),
    [
        ({}, 3, True),
        ({"gpu_layers": 1}, 1, True),
        ({"gpu_layers": 99}, 3, True),
        ({"gpu_layers": 0}, 0, False),
        ({"flash_attention": False}, 3, False),
    ],
    ids=str,
)
def test_where_there_is_a_gpu_all_layers_go_there_unless_fewer_are_asked_for(
    open_engine, monkeypatch, changes, layers, flash
):
    """Two layers and the last one; the library here only says that it has a GPU, and computes on the CPU as ever."""
    monkeypatch.setattr("slimproc.engines.llama_cpp.model.lib.llama_supports_gpu_offload", lambda: True)
    engine = open_engine(**changes)
    assert [engine.info.details[name] for name in ("gpu_layers", "flash_attention")] == [layers, flash]
    assert engine.complete("hello", 3).failure is None


def test_without_a_gpu_no_layer_goes_there_whatever_is_asked_for(open_engine, monkeypatch):
    monkeypatch.setattr("slimproc.engines.llama_cpp.model.lib.llama_supports_gpu_offload", lambda: False)
    details = open_engine(gpu_layers=99).info.details
    assert (details["gpu_layers"], details["flash_attention"]) == (0, False)


# --- before the library is there --------------------------------------------------------------------------------------


WATCHED = textwrap.dedent("""
    import os, sys
    from pathlib import Path

    def watch(event, arguments):
        if event == "ctypes.dlopen" and "llama" in str(arguments[0]):
            print(os.environ.get("GOMP_SPINCOUNT"), "libgomp" in Path("/proc/self/maps").read_text())

    sys.addaudithook(watch)
    import slimproc.engines.llama_cpp.backend
""")


@pytest.mark.parametrize(("own", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7")], ids=["", "operator's own"])
def test_how_long_openmp_spins_is_said_before_it_is_loaded_and_an_operators_own_word_stands(own, spins):
    environ = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    child = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=60, check=False, env=environ | own
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.splitlines()[0] == f"{spins} False"
