"""Arguments and outputs that no text is, or that lead nowhere: every command says so in a line."""

from __future__ import annotations

import io
import json
import sys

import pytest

from slimproc.cli import main
from slimproc.errors import EX_CONFIG

NO_TEXT = "\udcff.yaml"
"""As Python has a command line's bytes that are no UTF-8."""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("check-config", "~no-such-user/x"), EX_CONFIG),
        (("serve", "--config", "~no-such-user/x"), EX_CONFIG),
        (("import", "~no-such-user/x"), EX_CONFIG),
        (("ps", "--admin-socket", "~no-such-user/x"), 1),
        (("measure", "a", "--config", "c.yaml", "--body", "~no-such-user/x"), 2),
        (("chaos", "--config", "~no-such-user/x"), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_home_of_somebody_who_is_not_there_is_a_file_that_is_not_there(slimproc, here, arguments, status):
    (here / "c.yaml").write_text("models: {a: {backend: fake}}")
    result = slimproc(*arguments)
    assert (result.status, result.out) == (status, "")
    assert "~no-such-user/x" in result.err
    assert "No such file or directory" in result.err


def test_a_foreign_file_with_a_character_beyond_unicode_is_no_yaml(slimproc, here):
    (here / "c.yaml").write_text('models: {a: {cmd: "\\UFFFFFFFF"}}')
    result = slimproc("import", "c.yaml")
    assert (result.status, result.err) == (EX_CONFIG, "c.yaml: not valid YAML: a number is too large\n")


@pytest.mark.parametrize("verb", ["plan", "load", "unload"])
def test_a_model_whose_name_is_no_text_can_be_asked_for(slimproc, here, verb):
    result = slimproc(verb, "\udcff", "--admin-socket", str(here / "none.sock"))
    assert (result.status, result.out) == (1, "")
    assert "no server answers" in result.err


def test_a_files_name_that_is_no_text_is_shown_in_json(slimproc):
    result = slimproc("info", "--json", "--config", NO_TEXT)
    assert result.status == EX_CONFIG
    assert json.loads(result.out)["problems"] == [
        f"{NO_TEXT}: cannot read the configuration: No such file or directory"
    ]


def test_a_name_that_the_terminal_has_no_letters_for_is_shown_escaped(here, monkeypatch):
    (here / "c.yaml").write_text("models: {日本: {backend: fake}}", "utf-8")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["slimproc", "check-config", "c.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert rb"default model \u65e5\u672c" in shown.getvalue()
