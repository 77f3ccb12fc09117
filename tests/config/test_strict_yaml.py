"""What the YAML reader takes, and what it refuses with a line."""

from pathlib import Path

import pytest

from slimproc.config import yaml_source
from slimproc.errors import ConfigError


def read(tmp_path: Path, text: str | bytes):
    file = tmp_path / "x.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return yaml_source.read(file)


def slips(tmp_path: Path, text: str) -> list[str]:
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in read(tmp_path, text).problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("1.10", 1.1),
        ('"1"', "1"),
        ("'true'", "true"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("True", "True"),
        ("on", "on"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("8_192", "8_192"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        (".inf", ".inf"),
        (".5", ".5"),
        ("5.", "5."),
        ("+1", "+1"),
        ("9" * 20, "9" * 20),
        ("=", "="),
    ],
)
def test_a_scalar_is_what_it_says_and_nothing_is_coerced(tmp_path, written, value):
    found = read(tmp_path, f"key: {written}\n").data["key"]
    assert (type(found), found) == (type(value), value)


def test_lists_and_mappings_nest(tmp_path):
    assert read(tmp_path, "a: {b: [1, {c: x}]}\nd:\n- 1\n- e").data == {"a": {"b": [1, {"c": "x"}]}, "d": [1, "e"]}


def test_a_key_knows_its_line(tmp_path):
    document = read(tmp_path, "# one\na:\n  b:\n\n    c: 1\n")
    assert document.given(("a", "b", "c"), 1).line == 5
    assert document.given(("a", "b", "c"), 1).key == "a.b.c"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", ["x.yaml:3: a: duplicate key (first on line 1)"]),
        ("m:\n  a: 1\n  'a': {b: 1}\n", ["x.yaml:3: m.a: duplicate key (first on line 2)"]),
        ("a: &x 1\n", ["x.yaml:1: a: anchors (&x) are not allowed"]),
        (
            "a: &x {b: 1}\nc: *x\n",
            [
                "x.yaml:1: a: anchors (&x) are not allowed",
                "x.yaml:2: c: aliases (*x) are not allowed",
            ],
        ),
        ("m:\n  <<: {a: 1}\n", ["x.yaml:2: m.<<: merge keys are not allowed"]),
        ("a: !!str 1\n", ["x.yaml:1: a: tags (tag:yaml.org,2002:str) are not allowed; quote what is text"]),
        (
            "a: !!python/name:os.system x\n",
            ["x.yaml:1: a: tags (tag:yaml.org,2002:python/name:os.system) are not allowed; quote what is text"],
        ),
        ("m:\n  1: x\n", ["x.yaml:2: m: the key 1 is not text: quote it"]),
        ("true: x\n", ["x.yaml:1: the key true is not text: quote it"]),
        ("? [a, b]\n: x\nc: 1\n", ["x.yaml:1: a key must be text"]),
        ("? &k a\n: x\n", ["x.yaml:1: a: anchors and tags are not allowed"]),
        ("- a\n", ["x.yaml:1: wanted a mapping of settings, not a list"]),
        ("just text\n", ["x.yaml:1: wanted a mapping of settings, not 'just text'"]),
        ("a: 1\n---\nb: 2\n", ["x.yaml:2: a second YAML document in one file"]),
    ],
)
def test_a_slip_is_named_with_its_line(tmp_path, text, expected):
    assert slips(tmp_path, text) == expected


def test_what_follows_a_slip_is_still_read(tmp_path):
    document = read(tmp_path, "? [a]\n: {x: &y [1, 2]}\nb: 1\n1: 2\nc: *y\nd: 2\n")
    readable = document.children((), document.data)
    assert {key: given.value for key, given in readable.items()} == {"b": 1, "d": 2}


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "---\n", "null\n", "\ufeff# after a byte order mark\n"])
def test_an_empty_file_has_no_settings(tmp_path, text):
    document = read(tmp_path, text)
    assert (document.data, document.problems) == ({}, [])


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b"a: 1\nb: [1, 2\n", 3, "not valid YAML"),
        (b"a: 1\n\tb: 2\n", 2, "not valid YAML"),
        (b"a: 1\n b: 2\n", 2, "not valid YAML"),
        (b"a: 1\nb: '\x01'\n", 2, "a control character"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8"),
        (b"a: *nowhere\nb: {", 2, "not valid YAML"),
        (b'a: 1\nb: "\\UFFFFFFFF"\n', 2, "not valid YAML: a number is too large"),
        (b'a: 1\nb: "\\U00110000"\n', 2, "not valid YAML: a number is too large"),
        (b"%YAML " + b"1" * 5000 + b".1\n---\na: 1\n", 1, "not valid YAML: a number is too large"),
        (b"a: 1\nb: " + b"[" * 5000 + b"]" * 5000, 2, "nested too deeply"),
        (b"a: 1\nb: " + b"{a: " * 60 + b"}" * 60, 2, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_a_line(tmp_path, text, line, reason):
    with pytest.raises(ConfigError, match=f"x.yaml:{line}: .*{reason}"):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.yaml: cannot read the configuration: No such file"):
        yaml_source.read(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot read the configuration: Is a directory"):
        yaml_source.read(tmp_path)


def test_a_file_without_end_is_not_read_to_it():
    with pytest.raises(ConfigError, match="larger than 4MiB"):
        yaml_source.read(Path("/dev/zero"))
