"""Every broken file ends in a stated cause: refused before llama.cpp sees it, by llama.cpp, or with the engine's process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.errors import LoadFailed
from tests.broken_models import broken_files, lfs_download, with_nan_weights, without_vocabulary
from tests.models import lora

ROOT = str(Path(__file__).parents[3])

REFUSED_UNSEEN = {
    "empty": "is empty",
    "three bytes": "is not a GGUF file",
    "wrong magic": "is not a GGUF file (it begins with b'GGML')",
    "zeros": "is not a GGUF file",
    "random bytes": "is not a GGUF file",
    "text": "is a text, not a model",
    "JSON": "is a text, not a model",
    "web page": "is a web page",
    "LFS pointer": "is a Git LFS pointer",
    "git-annex pointer": "is a git-annex pointer",
    "safetensors": "is a safetensors file",
    "PyTorch": "is a zip archive or PyTorch's weights",
    "gzip": "is compressed with gzip",
    "ggjt": "is in a format older than GGUF",
    "version 1": "has GGUF version 1",
    "version 99": "has GGUF version 99",
    "big endian": "was written for a big-endian machine",
    "cut in the header": "is cut off",
    "cut in the keys": "is cut off",
    "cut in the tensor list": "is cut off",
    "cut in the middle": "is shorter than its tensors say",
    "last 32 bytes missing": "is shorter than its tensors say",
    "2^63 tensors": "its header claims 9223372036854775808 tensors",
    "2^40 tensors": "its header claims 1099511627776 tensors",
    "2^31 tensors": "its header claims 2147483648 tensors",
    "no tensors": "has no tensors",
    "one tensor too many": "is broken",
    "2^63 keys": "9223372036854775808 keys",
    "2^40 keys": "1099511627776 keys",
    "no keys": "is broken",
    "key of 2^62 bytes": "is cut off or broken in its header",
    "key of 4 GiB": "is cut off or broken in its header",
    "array of 2^60": "is cut off or broken in its header",
    "array of 2^33": "is cut off or broken in its header",
    "100 dimensions": "has 100 dimensions",
    "dimension 2^62": "is shorter than its tensors say",
    "dimension -1": "has a negative size",
    "tensor offset 2^62": "is shorter than its tensors say",
    "unknown key type": "a key has the unknown type 77",
    "0 tokens of context": "was trained for a context of 0 tokens",
    "unknown BOS": "its bos token is number 99999, and its vocabulary has 260 tokens",
    "unknown EOS": "its eos token is number 99999, and its vocabulary has 260 tokens",
    "0 layers": "it says that it has 0 layers",
    "513 layers": "it says that it has 513 layers",
    "100,000 layers": "it says that it has 100000 layers",
    "epsilon of NaN": "its llama.attention.layer_norm_rms_epsilon is nan",
    "epsilon of -1": "its llama.attention.layer_norm_rms_epsilon is -1.0",
    "infinite epsilon": "its llama.attention.layer_norm_rms_epsilon is inf",
}
REFUSED_BY_LLAMA_CPP = {
    "dimension 0": "has offset",
    "tensor type 999": "invalid ggml type 999",
    "tensor type Q4_0": "has offset",
    "removed tensor type": "of type 4 (DEPRECATED)",
    "tensor offset + 8": "has offset",
    "two tensors of one name": "duplicate tensor name",
    "3 layers, 2 present": "blk.2.attn_norm.weight",
    "0 heads": "wrong shape",
    "3 heads": "wrong shape",
    "0 KV heads": "wrong shape",
    "3 KV heads": "wrong shape",
    "8 KV heads": "wrong shape",
    "0 wide": "wrong shape",
    "63 wide": "wrong shape",
    "0 rope dimensions": "invalid n_rot: 0",
    "7 rope dimensions": "invalid n_rot: 7",
    "unknown architecture": "unknown model architecture: 'lxama'",
    "unknown tokenizer": "unknown tokenizer: 'xpt2'",
    "unknown pre-tokenizer": "unknown pre-tokenizer type: 'xpt-2'",
    "no merges": "cannot find tokenizer merges",
    "no vocabulary": "cannot find tokenizer vocab",
}
DIES_IN_LOAD = {"two words alike": "id_to_token.size() == token_to_id.size()"}
DIES_IN_THE_FIRST_STEP = {"norm of integers": "binary_op: unsupported types"}
SERVED_WITH_A_WARNING = {
    "5 tokens of vocabulary": "says that its vocabulary has 5 tokens, and it has 260",
    "2^31 tokens of vocabulary": "says that its vocabulary has 2147483648 tokens, and it has 260",
}
FAILS_ITS_SEQUENCES = {"weights of NaN", "weights of random bytes"}
THE_RENDERERS_AFFAIR = {"template that cannot be parsed"}

CHILD = textwrap.dedent("""
    import os, sys
    from tests.engines.driver import Engine
    from slimproc.engines.backend import create
    from slimproc.errors import LoadFailed
    from slimproc.settings import EngineSettings
    settings = EngineSettings(model="m", backend="llama_cpp", path=sys.argv[1], slots=1, context=64)
    backend = create(settings)
    if len(sys.argv) > 2:
        os.setuid(int(sys.argv[2]))
    try:
        engine = Engine(backend)
    except LoadFailed as error:
        print("refused", error.permanent, error.message)
    else:
        print("loaded", flush=True)
        print("generated", engine.complete("hello", 4).failure)
""")
NOBODY = 65534


def in_child(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(path), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={"GGML_NO_BACKTRACE": "1", "PYTHONPATH": ROOT},
    )  # fmt: skip


def refusal(settings) -> str:
    """Of a load that is not worth trying again."""
    with pytest.raises(LoadFailed) as failure:
        create(settings).load(lambda _fraction: None)
    assert failure.value.permanent
    assert "\n" not in failure.value.message
    return failure.value.message


@pytest.fixture
def broken(models, tmp_path):
    """The path of a file with one kind of damage."""

    def make(name: str) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(broken_files(models / "tiny.gguf")[name])
        return path

    return make


def test_no_kind_of_broken_file_is_left_out(models):
    tables = [
        REFUSED_UNSEEN, REFUSED_BY_LLAMA_CPP, DIES_IN_LOAD, DIES_IN_THE_FIRST_STEP, SERVED_WITH_A_WARNING,
        FAILS_ITS_SEQUENCES, THE_RENDERERS_AFFAIR,
    ]  # fmt: skip
    listed = [name for table in tables for name in table]
    assert sorted(listed) == sorted(broken_files(models / "tiny.gguf"))


@pytest.mark.parametrize("name", REFUSED_UNSEEN)
def test_what_the_header_shows_is_refused_before_llama_cpp_sees_the_file(settings, broken, monkeypatch, name):
    monkeypatch.setattr("slimproc.engines.llama_cpp.model.lib.llama_model_load_from_file", None)
    path = broken(name)
    message = refusal(settings(path))
    assert REFUSED_UNSEEN[name] in message
    assert str(path) in message


@pytest.mark.parametrize("name", REFUSED_BY_LLAMA_CPP)
def test_what_llama_cpp_refuses_comes_with_its_reason(settings, broken, capfd, name):
    path, words = broken(name), REFUSED_BY_LLAMA_CPP[name]
    message = refusal(settings(path))
    assert words in message
    assert str(path) in message
    assert words.split()[-1].strip("'") in capfd.readouterr().err, "and it stands in the log"


@pytest.mark.parametrize("name", DIES_IN_LOAD)
def test_an_assertion_in_the_load_costs_the_process_and_leaves_its_text_on_stderr(broken, name):
    child = in_child(broken(name))
    assert (child.returncode, child.stdout) == (-6, "")
    assert "GGML_ASSERT" in child.stderr
    assert DIES_IN_LOAD[name] in child.stderr


@pytest.mark.parametrize("name", DIES_IN_THE_FIRST_STEP)
def test_an_assertion_in_the_first_step_costs_the_process_and_leaves_its_text_on_stderr(broken, name):
    child = in_child(broken(name))
    assert (child.returncode, child.stdout) == (-6, "loaded\n")
    assert DIES_IN_THE_FIRST_STEP[name] in child.stderr


@pytest.mark.parametrize("name", SERVED_WITH_A_WARNING)
def test_what_is_merely_odd_is_said_and_served(open_engine, broken, capfd, name):
    engine = open_engine(broken(name))
    assert SERVED_WITH_A_WARNING[name] in capfd.readouterr().err
    assert engine.complete("hello", 4).failure is None


@pytest.mark.parametrize("name", sorted(FAILS_ITS_SEQUENCES))
def test_weights_that_are_none_fail_their_sequences_with_the_cause_and_the_engine_lives(open_engine, broken, name):
    engine = open_engine(broken(name))
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
        assert "NaN" in engine.complete("hello", 4, **options).failure


def test_a_template_that_cannot_be_parsed_is_passed_on_to_who_renders(open_engine, broken):
    engine = open_engine(broken("template that cannot be parsed"))
    assert engine.info.chat_template.startswith("{% fxx")
    assert engine.complete("hello", 4).failure is None


def test_a_model_of_nan_fails_its_sequences_also_beside_speculation(open_engine, models, tmp_path):
    engine = open_engine(with_nan_weights(tmp_path / "nan.gguf", models / "tiny.gguf"), speculation=4)
    assert "NaN" in engine.complete("abcabcabcabc", 4).failure


@pytest.mark.parametrize("seen", [True, False], ids=["by its header", "once it is loaded"])
def test_a_model_without_a_vocabulary_is_refused(settings, models, tmp_path, monkeypatch, seen):
    path = without_vocabulary(tmp_path / "model.gguf", models / "tiny.gguf")
    if not seen:
        monkeypatch.setattr("slimproc.engines.llama_cpp.model.check_keys", lambda *_: None)
    assert "has no vocabulary" in refusal(settings(path))


# --- paths that are no files ------------------------------------------------------------------------------------------


def test_a_path_that_is_no_file_is_named_for_what_it_is(settings, tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
    for path, words in [
        (tmp_path, "is a directory, not a GGUF file"),
        (tmp_path / "absent.gguf", "there is no file or directory"),
        (Path("/dev/null"), "is not a file"),
        (tmp_path / "pipe.gguf", "is not a file"),
        (tmp_path / "loop.gguf", "is a symbolic link that leads to itself"),
        (tmp_path / "gone.gguf", "is a symbolic link to"),
    ]:
        message = refusal(settings(path))
        assert words in message
        assert path.name in message


def test_what_git_lfs_and_annex_leave_behind_is_named(settings, tmp_path):
    path = lfs_download(tmp_path)
    assert "Git LFS pointer" in refusal(settings(path))
    annexed = tmp_path / "annexed.gguf"
    annexed.symlink_to(".git/annex/objects/xx/yy/SHA256E-s1--0.gguf/SHA256E-s1--0.gguf")
    assert ".git/annex/objects" in refusal(settings(annexed))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read the file")
def test_a_file_that_may_not_be_read_is_named(models, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes((models / "tiny.gguf").read_bytes())
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o711)
    child = in_child(path, str(NOBODY))
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == f"refused True {path} cannot be read: Permission denied\n"


# --- other parts of models ----------------------------------------------------------------------------------------


def test_another_part_of_a_model_is_named_for_what_it_is(settings, tmp_path):
    adapter = lora(tmp_path / "adapter.gguf")
    assert "is a LoRA adapter, not a model: name it under lora" in refusal(settings(adapter))
    mmproj = lora(tmp_path / "mmproj.gguf", arch="clip", keys={"general.type": "mmproj", "adapter.type": None})
    assert "the part of a model that sees or hears (mmproj)" in refusal(settings(mmproj))
    older = lora(tmp_path / "older.gguf", arch="clip", keys={"general.type": None, "adapter.type": None})
    assert "the part of a model that sees or hears (mmproj)" in refusal(settings(older))
