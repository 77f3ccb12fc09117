"""The example files and the documentation name every key, and what they say loads."""

import re
from pathlib import Path

import msgspec
import yaml

from slimproc.config import load_config
from slimproc.config.blocks import COMMAND_KINDS, FAKE_KINDS, POLICY_KINDS, PREPARE_KINDS, PROFILE_KINDS, REMOTE_KINDS
from slimproc.config.environment import VARIABLES, from_dotenv
from slimproc.config.model import MODEL_BLOCKS, MODEL_KINDS, ModelConfig
from slimproc.config.models import INHERITED
from slimproc.config.runtime import RuntimeDirectory
from slimproc.config.upstream import Command, MemoryPolicy, MemoryProfile, Remote
from slimproc.config.values import plain
from slimproc.config.whole import KINDS, Config
from slimproc.settings import FakeSettings

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "config.example.yaml").read_text("utf-8")
IN_USE = re.compile(r"^( *)#(?=\w+:)", re.MULTILINE)


def uncommented(tmp_path: Path) -> Path:
    (tmp_path / "smollm2.jinja").touch()
    file = tmp_path / "slimproc.yaml"
    file.write_text(IN_USE.sub(r"\1", EXAMPLE), "utf-8")
    return file


def test_the_example_loads_as_it_is():
    config = load_config(ROOT / "config.example.yaml", flags={}, environ={}, dotenv=None)
    assert list(config.models) == ["smollm2", "echo"]


def test_the_example_names_every_key_and_loads_with_every_line_in_use(tmp_path):
    file = uncommented(tmp_path)
    config = load_config(file, flags={}, environ={}, dotenv=None)
    data = yaml.safe_load(file.read_text("utf-8"))
    models = data.pop("models")
    assert data.keys() == {*KINDS, "memory"}
    assert data["memory"].keys() == POLICY_KINDS.keys()
    assert set().union(*models.values()) == {*MODEL_KINDS, *MODEL_BLOCKS}
    for key, kinds in {
        "fake": FAKE_KINDS, "memory": PROFILE_KINDS, "remote": {**REMOTE_KINDS, "prepare": 0}, "command": COMMAND_KINDS,
    }.items():  # fmt: skip
        assert set().union(*(model.get(key, {}) for model in models.values())) == kinds.keys(), key
    assert list(config.models) == ["smollm2", "echo", "asr", "aligner", "vlm", "elsewhere", "coder"]


def test_the_three_models_of_the_example_do_not_fit_together_but_each_does(tmp_path):
    config = load_config(uncommented(tmp_path), flags={}, environ={}, dotenv=None)
    peaks = [config.models[name].memory.inference_peak for name in ("asr", "aligner", "vlm")]
    assert len({config.models[name].device for name in ("asr", "aligner", "vlm")}) == 1
    assert max(peaks) < 24 << 30 < min(a + b for a in peaks for b in peaks if a != b)


def test_every_key_of_the_example_has_a_comment_above_it_or_above_its_group():
    lines = EXAMPLE.splitlines()
    for number, line in enumerate(lines):
        if re.match(r" *#?\w+:", line) and line != "models:":
            above = lines[number - 1]
            assert re.match(r" *# ", above) or re.match(r" *#?\w+:", above), line


def test_what_the_example_shows_is_the_default_unless_it_says_otherwise():
    config = load_config(ROOT / "config.example.yaml", flags={}, environ={}, dotenv=None)
    bare = Config(models={}, state_dir=Path("/s"), runtime=RuntimeDirectory(Path("/r")))
    for key in KINDS.keys() - {"default_model", "state_dir"}:
        assert getattr(config, key) == getattr(bare, key), key
    model, plain = config.models["smollm2"], ModelConfig(name="m", backend="llama_cpp")
    for key in MODEL_KINDS.keys() - {"name", "path", "aliases", "context"}:
        assert getattr(model, key) == getattr(plain, key), key
    assert config.models["echo"].fake == plain.fake


def test_the_env_example_names_every_variable_and_loads(tmp_path):
    file = tmp_path / ".env"
    file.write_text(re.sub(r"(?m)^#(?=SLIMPROC_)", "", (ROOT / ".env.example").read_text("utf-8")))
    found, problems = from_dotenv(file)
    assert problems == []
    assert found.keys() == set(VARIABLES.values())
    load_config(ROOT / "config.example.yaml", flags={}, environ={}, dotenv=file)


def test_the_env_example_changes_nothing_as_it_is():
    assert from_dotenv(ROOT / ".env.example") == ({}, [])


def test_the_documentation_has_a_row_for_every_key():
    rows = set()
    for line in (ROOT / "docs" / "configuration.md").read_text("utf-8").splitlines():
        if line.startswith("| `"):
            rows.update(re.findall(r"`(\w+)`", line.split("|")[1]))
    assert rows == {
        *("models", "prepare", *KINDS, *MODEL_KINDS, *MODEL_BLOCKS),
        *(*FAKE_KINDS, *PROFILE_KINDS, *POLICY_KINDS, *REMOTE_KINDS, *COMMAND_KINDS),
    }
    assert PREPARE_KINDS.keys() <= COMMAND_KINDS.keys(), "the row of argv has both"


TABLES = {
    "Top-level keys": (KINDS, Config),
    "Keys of `memory` at the top level": (POLICY_KINDS, MemoryPolicy),
    "Keys of a model": (MODEL_KINDS, ModelConfig),
    "Keys of `fake`": (FAKE_KINDS, FakeSettings),
    "Keys of `memory` in a model": (PROFILE_KINDS, MemoryProfile),
    "Keys of `remote`": (REMOTE_KINDS, Remote),
    "Keys of `command`": (COMMAND_KINDS, Command),
}
"""What each section of the page is about."""


def test_the_documentation_says_the_defaults_that_are_in_force():
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"(?m)^## ", text)}
    for heading, (kinds, struct) in TABLES.items():
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        rows = re.findall(r"(?m)^\| (`[^|]*) \| ([^|]*) \|", sections[heading])
        told = {key: cell for keys, cell in rows for key in re.findall(r"`(\w+)`", keys)}
        assert kinds.keys() <= told.keys()
        for key, kind in kinds.items():
            default, value = defaults.get(key, msgspec.NODEFAULT), re.match(r"`([^`$]+)`", told[key])
            if struct is ModelConfig and key in INHERITED:
                assert told[key].startswith("the top-level value"), key
            elif value:
                assert kind.read(plain(value[1])) == default, key
            else:
                assert default in (msgspec.NODEFAULT, None, "", ()), f"{heading}: {key}: {told[key]}"
