"""slimproc measure: what is refused before anything is started, and how the block gets into the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.cli.measuring import rewriting
from slimproc.cli.measuring.contexts import _starter
from slimproc.cli.measuring.edit import CannotEdit, indent_of, with_memory
from slimproc.cli.measuring.profile import block
from slimproc.config import MemoryProfile, load_config
from slimproc.ipc.wire import Embed, ModelInfo, Submit
from slimproc.request import EMBED, GENERATE, RERANK

MEMORY = MemoryProfile(load_peak=11, inference_peak=22, residual=3, max_concurrency=4, profile_id='a "card" #1: é')
FLOW = 'load_peak: 11, inference_peak: 22, residual: 3, max_concurrency: 4, profile_id: "a \\"card\\" #1: é"'
LINES = [*block(MEMORY, 4), ""]
REMOTE = 'remote: {base_url: "http://127.0.0.1:8080"}, inference_path: /x, max_body: 1MiB'
FILE = f"""
models:
  fake: {{backend: fake, aliases: [f, "*"]}}
  far: {{{REMOTE}, concurrency: 3}}
  chat: {{remote: {{base_url: "http://127.0.0.1:8081"}}, inference_path: /v1/chat/completions, max_body: 5}}
  there: {{remote: {{base_url: "http://127.0.0.1:8082", contract: none}}, inference_path: /x, max_body: 1MiB}}
"""


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "there is no model 'nobody'; there are fake, far, chat, there"),
        (["*"], "there is no model '*'"),
        (["there"], "contract: none"),
        (["fake", "--rounds", "0"], "--rounds: a whole number from 1 to 1000, not '0'"),
        (["fake", "--rounds", "two"], "--rounds"),
        (["fake", "--requests", "-1"], "--requests"),
        (["fake", "--concurrency", "9" * 30], "--concurrency"),
        (["fake", "--headroom", "nan"], "--headroom: per cent"),
        (["fake", "--headroom", "-5"], "--headroom: per cent"),
        (["fake", "--body", "slimproc.yaml"], "--body is for servers that are no engines of ours"),
        (["fake", "--content-type", "a/b"], "--content-type is of a --body"),
        (["far", "--body", "missing.wav"], "--body: missing.wav: No such file"),
        (["far", "--body", "slimproc.yaml", "--content-type", "a\nb: c"], "cannot be a header"),
        (["far"], "--body is needed: what /x takes is not known"),
        (["far", "--body", "slimproc.yaml", "--concurrency", "2"], "serves 3 at once"),
        (["chat"], "the model's max_body is 5"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(slimproc, here, arguments, said):
    (here / "slimproc.yaml").write_text(FILE)
    result = slimproc("measure", *arguments)

    assert (result.status, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("slimproc measure: ")
    assert said in line


def test_a_wrong_configuration_is_told_as_everywhere(slimproc, here):
    (here / "slimproc.yaml").write_text("models: {m: {backend: fake, slots: 0}}")
    result = slimproc("measure", "m")

    assert result.status == 78
    assert "models.m.slots" in result.err


def test_while_a_server_of_this_configuration_runs_nothing_is_measured(slimproc, here, admin):
    (here / "slimproc.yaml").write_text(f"admin_socket: own.sock\n{FILE}")
    admin(here / "own.sock", b"{}")
    result = slimproc("measure", "fake")

    assert (result.status, result.out) == (1, "")
    assert f"a server of this configuration is running ({here / 'own.sock'})" in result.err


def test_without_a_file_there_is_nothing_to_write_to(slimproc, here, monkeypatch):
    monkeypatch.chdir(here)
    result = slimproc("measure", "smollm2", "--write")

    assert result.status == 2
    assert "no configuration file" in result.err


def test_a_file_that_cannot_be_edited_is_refused_before_the_work(slimproc, here):
    text = "models:\n  m:\n    backend: fake\n    name: |-\n      Long\n"
    (here / "slimproc.yaml").write_text(text)
    result = slimproc("measure", "m", "--write")

    assert result.status == 1
    assert "a text of several lines" in result.err
    assert [file.name for file in here.iterdir()] == ["slimproc.yaml"]


# --- requests that fill a context -------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [8, 9, 64, 4096])
def test_a_prompt_and_what_is_generated_fill_the_context_and_no_two_prompts_begin_alike(context):
    model = ModelInfo(context=context, slots=2, vocab_size=100)
    first, second = (_starter(model, list(range(50)), number)(1) for number in (0, 1))

    assert isinstance(first, Submit)
    assert len(first.prompt) + first.max_tokens == context
    assert first.max_tokens > 0
    assert first.sampling.ignore_eos
    assert first.prompt[0] != second.prompt[0]


@pytest.mark.parametrize(("capabilities", "asks"), [((EMBED,), False), ((RERANK,), True), ((EMBED, RERANK), False)])
def test_a_model_that_generates_nothing_reads_a_whole_context(capabilities, asks):
    start = _starter(ModelInfo(context=64, slots=1, vocab_size=9, capabilities=capabilities), [1, 2], 0)(7)

    assert isinstance(start, Embed)
    assert len(start.prompt) == 64
    assert (start.query is not None) == asks
    assert GENERATE not in capabilities


# --- the block in the file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("models:\n  m:\n    backend: fake  # why\n", "models:\n  m:\n    backend: fake  # why\n" + "\n".join(LINES)),
        ("models:\n  m:\n    backend: fake", "models:\n  m:\n    backend: fake\n" + "\n".join(LINES)),
        (
            "models:\r\n  m:\r\n    backend: fake\r\n# end\r\n",
            "models:\r\n  m:\r\n    backend: fake\r\n" + "\r\n".join(LINES) + "# end\r\n",
        ),
        ("models: {m: {backend: fake}}  # x\n", f"models: {{m: {{backend: fake, memory: {{{FLOW}}}}}}}  # x\n"),
        (
            "models:\n  m: {backend: fake,\n   slots: 2,}\n",
            f"models:\n  m: {{backend: fake,\n   slots: 2, memory: {{{FLOW}}},}}\n",
        ),
        (
            "models:\n  m:\n    memory: {load_peak: 20GiB, inference_peak: '1GiB', residual: 0}  # old\n    backend: fake\n",
            f"models:\n  m:\n    memory: {{{FLOW}}}  # old\n    backend: fake\n",
        ),
        (
            "models:\n  m:\n    memory:\n      # at most\n      inference_peak: 1   # b\n      load_peak: 1GiB\n\n    backend: fake\n",
            (
                "models:\n  m:\n    memory:\n      # at most\n      inference_peak: 22   # b\n      load_peak: 11\n"
                '      residual: 3\n      max_concurrency: 4\n      profile_id: "a \\"card\\" #1: é"\n\n    backend: fake\n'
            ),
        ),
        (
            "models:\n  'm':\n        backend: fake\n        fake:\n          bytes: 5\n  n: {backend: fake}\nlisten: :1\n",
            "models:\n  'm':\n        backend: fake\n        fake:\n          bytes: 5\n"
            + "\n".join([*block(MEMORY, 8), ""])
            + "  n: {backend: fake}\nlisten: :1\n",
        ),
        (
            "models:\n  m:\n    backend: fake\n    aliases:\n    - a\n    - [b]\n".replace("[b]", "b"),
            "models:\n  m:\n    backend: fake\n    aliases:\n    - a\n    - b\n" + "\n".join(LINES),
        ),
        ("\ufeffmodels:\n  m:\n    backend: fake\n", "\ufeffmodels:\n  m:\n    backend: fake\n" + "\n".join(LINES)),
    ],
    ids=["block", "no-end", "crlf", "flow", "flow-lines", "flow-there", "block-there", "deep", "list", "bom"],
)
def test_the_block_comes_into_any_form_of_file_and_nothing_else_changes(tmp_path, before, after):
    assert with_memory(before, "m", MEMORY) == after
    file = tmp_path / "slimproc.yaml"
    file.write_bytes(before.encode())
    file.chmod(0o640)
    rewriting.rewrite(file, "m", MEMORY)

    assert file.read_bytes() == after.encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert load_config(file, flags={}, environ={}, dotenv=None).models["m"].memory == MEMORY
    assert list(tmp_path.iterdir()) == [file]


def test_writing_twice_is_writing_once(tmp_path):
    file = tmp_path / "slimproc.yaml"
    file.write_text("models:\n  m: # one\n    backend: fake\n")
    rewriting.rewrite(file, "m", MEMORY)
    first = file.read_text()
    rewriting.rewrite(file, "m", MEMORY)

    assert file.read_text() == first


def test_the_example_takes_a_block_in_each_of_its_models(tmp_path):
    text = (Path(__file__).parents[2] / "config.example.yaml").read_text(encoding="utf-8")
    file = tmp_path / "slimproc.yaml"
    file.write_text(text, encoding="utf-8")
    for name in load_config(file, flags={}, environ={}, dotenv=None).models:
        rewriting.rewrite(file, name, MEMORY)

    config = load_config(file, flags={}, environ={}, dotenv=None)
    assert {model.memory for model in config.models.values()} == {MEMORY}
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if line in text.splitlines()]
    assert kept == text.splitlines()


def test_a_link_stays_a_link_and_relative_paths_start_where_they_did(tmp_path):
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "file.yaml"
    real.write_text("state_dir: state\nmodels:\n  m:\n    backend: fake\n")
    link = tmp_path / "slimproc.yaml"
    link.symlink_to(real)
    rewriting.rewrite(link, "m", MEMORY)

    assert link.is_symlink()
    assert load_config(link, flags={}, environ={}, dotenv=None).models["m"].memory == MEMORY
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file.yaml", "real", "slimproc.yaml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models:\n  other:\n    backend: fake\n", "it has no model 'm' any more"),
        ("models:\n  m:\n    backend: fake\n    slots: 0\n", "the configuration would be wrong"),
        (f"models:\n  m: {{{REMOTE}, concurrency: 9}}\n", "at most 4 at once"),
    ],
)
def test_a_file_that_would_not_load_with_it_stays_as_it_is(tmp_path, text, said):
    file = tmp_path / "slimproc.yaml"
    file.write_text(text)
    with pytest.raises(CannotEdit) as refused:
        rewriting.rewrite(file, "m", MEMORY)

    assert said in str(refused.value)
    assert file.read_text() == text
    assert list(tmp_path.iterdir()) == [file]


def test_an_edit_that_changed_anything_else_would_not_be_written(tmp_path, monkeypatch):
    file = tmp_path / "slimproc.yaml"
    text = "models:\n  m:\n    backend: fake\n"
    file.write_text(text)
    honest = rewriting.with_memory
    monkeypatch.setattr(rewriting, "with_memory", lambda *given: honest(*given) + "    slots: 9\n")
    with pytest.raises(CannotEdit, match="more than m's memory would change"):
        rewriting.rewrite(file, "m", MEMORY)

    assert file.read_text() == text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_found_out_before_the_work(tmp_path):
    file = tmp_path / "slimproc.yaml"
    file.write_text("models:\n  m:\n    backend: fake\n")
    tmp_path.chmod(0o500)
    with pytest.raises(CannotEdit):
        rewriting.check(file, "m")


@given(
    st.integers(0, 1 << 50),
    st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=40),
    st.booleans(),
)
def test_any_profile_comes_back_from_the_file_as_it_was_written(tmp_path_factory, size, words, flow):
    memory = MemoryProfile(load_peak=size, inference_peak=size, max_concurrency=4, profile_id=words)
    before = "models: {m: {backend: fake}}" if flow else "models:\n  m:\n    backend: fake"
    file = tmp_path_factory.mktemp("any") / "slimproc.yaml"
    file.write_text(with_memory(before, "m", memory), encoding="utf-8", newline="")

    assert load_config(file, flags={}, environ={}, dotenv=None).models["m"].memory == memory


def test_a_printed_block_begins_where_the_models_own_keys_do():
    assert indent_of("models:\n  m:\n      backend: fake\n", "m") == 6
    assert indent_of("models: {m: {backend: fake}}\n", "m") == 4
    assert indent_of("models:\n  n: {backend: fake}\n", "m") == 4
    assert json.loads("[" + block(MEMORY, 6)[-1].partition(": ")[2] + "]") == [MEMORY.profile_id]
