"""The JSON Schema for editors: what the parser takes is valid under it, and what is plainly wrong is not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from slimproc.config.blocks import BLOCKS, POLICY
from slimproc.config.model import MODEL_KINDS
from slimproc.config.schema import schema
from slimproc.config.values import YEAR, Kind, Wrong
from slimproc.config.whole import KINDS
from tests.config.test_config_documents import ROOT, uncommented
from tests.config.test_upstream_models import COMMAND, GOOD, MEMORY, PATH, REMOTE, THERE, one
from tests.documents import DOCUMENTS

SCHEMA = json.loads((ROOT / "docs" / "slimproc.schema.json").read_text("utf-8"))


def spelled(part: object) -> object:
    """With ``{"not": {}}`` for ``false``, which means the same: of a mere ``false`` the library does not say where it is."""
    if isinstance(part, list):
        return [spelled(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    never = {name: {"not": {}} for name, inner in part.get("properties", {}).items() if inner is False}
    found = {key: spelled(value) for key, value in part.items()}
    return found | {"properties": found["properties"] | never} if never else found


VALIDATOR = Draft202012Validator(spelled(SCHEMA))


def wrong(data: object) -> set[str]:
    """Where it is not valid: keys with dots between them."""
    return {".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(data)}


def values_of(part: object) -> Iterator[dict]:
    """Every schema inside a schema that has a default."""
    if isinstance(part, dict):
        if "default" in part and "description" in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from values_of(inner)


def test_the_schema_is_one_and_every_default_in_it_is_valid() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    described = list(values_of(SCHEMA))
    assert len(described) > 40
    for part in described:
        Draft202012Validator(part).validate(part["default"])


def test_every_key_has_a_description_and_says_what_it_takes() -> None:
    found = schema()
    for mapping in (found, found["$defs"]["model"], *found["$defs"]["model"]["properties"].values()):
        for key, value in mapping.get("properties", {}).items():
            assert len(value) > 1, key
            assert value["description"], key


def test_the_example_is_valid_as_it_is_and_with_every_line_in_use(tmp_path) -> None:
    assert wrong(yaml.safe_load((ROOT / "config.example.yaml").read_text("utf-8"))) == set()
    assert wrong(yaml.safe_load(uncommented(tmp_path).read_text("utf-8"))) == set()


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_configuration_that_is_shown_whole_is_valid(file: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```$", file.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if re.search(r"^models:", block, re.MULTILINE):
            assert wrong(yaml.safe_load(block)) == set()


@pytest.mark.parametrize(
    "text",
    [
        *map(one, GOOD),
        one(f"{REMOTE}, {PATH}, {MEMORY}, prepare_timeout: 7, concurrency: 2, pin: true, ttl: 1, device: GPU-1"),
        one(f'remote: {{base_url: ["HTTP://a:1/", "https://[::1]:2"], contract: control}}, {PATH}, {MEMORY}'),
        one(f"{THERE.removesuffix('}')}, health_path: /ok}}, {PATH}"),
        one(f"backend: fake, {MEMORY}, inference_path: /v1/rerank, fake: {{ttft: 0, bytes: 1.5GiB}}"),
        one("backend: llama_cpp, path: x, lora: [a, {path: b}, {path: c, scale: -2}], kv_type: q4_0, confine: 'off'"),
        one("backend: mlx, path: hf:a/b, context: 8, threads: 1024, request_timeout: 0.5"),
        "listen: '[::1]:0'\nmemory: {devices: [host], margin: 0}\nmodels: {a b: {backend: fake, aliases: ['*']}}",
        "ring_size: 64KiB\nmax_json_body: 4096\npreload: []\nmodels: {ü: {backend: fake}, b: {backend: fake}}",
    ],
)
def test_what_is_right_is_valid(load, text: str) -> None:
    assert load(text).models
    assert wrong(yaml.safe_load(text)) == set()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("listn: ':1'\nmodels: {m: {backend: fake}}", ""),
        ("listen: '1'\nmodels: {m: {backend: fake}}", "listen"),
        ("log_level: loud\nmodels: {m: {backend: fake}}", "log_level"),
        ("ring_size: 1 MB!\nmodels: {m: {backend: fake}}", "ring_size"),
        ("request_timeout: 0\nmodels: {m: {backend: fake}}", "request_timeout"),
        ("memory: {devices: [cuda]}\nmodels: {m: {backend: fake}}", "memory.devices.0"),
        ("listen: ':1'", ""),
        ("models: {}", "models"),
        ("models: {'*': {backend: fake}}", "models"),
        (one("slots: 4"), "models.m"),
        (one("backend: vllm, path: x"), "models.m.backend"),
        (one("backend: llama_cpp"), "models.m"),
        (one("backend: fake, path: x"), "models.m.path"),
        (one("backend: fake, slots: '4'"), "models.m.slots"),
        (one("backend: fake, slots: 257"), "models.m.slots"),
        (one("backend: fake, pooling: cls"), "models.m.pooling"),
        (one("backend: mlx, path: x, fake: {}"), "models.m.fake"),
        (one("backend: fake, fake: {ttfb: 1}"), "models.m.fake"),
        (one("backend: fake, concurrency: 2"), "models.m.concurrency"),
        (one("backend: fake, inference_path: /align"), "models.m.inference_path"),
        (one("backend: llama_cpp, path: x, lora: [{path: a, weight: 1}]"), "models.m.lora.0"),
        (one("backend: fake, memory: {load_peak: 1GiB}"), "models.m.memory"),
        (one(f"{REMOTE}, {PATH}"), "models.m"),
        (one(f"{REMOTE}, max_body: 1, {MEMORY}"), "models.m"),
        (one(f"{COMMAND}, {PATH}, {MEMORY}, prepare_timeout: 1"), "models.m.prepare_timeout"),
        (one(f"{COMMAND}, {PATH}, {MEMORY}, slots: 1"), "models.m.slots"),
        (one(f"{THERE}, {PATH}, {MEMORY}"), "models.m.memory"),
        (one(f'remote: {{base_url: "http://a:1"}}, {PATH}, {MEMORY}, prepare_timeout: 1'), "models.m.remote"),
        (one(f'remote: {{base_url: "http://a:1/v1"}}, {PATH}, {MEMORY}'), "models.m.remote.base_url"),
        (one(f"{REMOTE.replace('/opt/', '')}, {PATH}, {MEMORY}"), "models.m.remote.prepare.argv.0"),
        (one(f'remote: {{base_url: "http://a:1", health_path: /x}}, {PATH}, {MEMORY}'), "models.m.remote.health_path"),
        (one(f"{THERE.removesuffix('}')}, prepare: {{argv: [/x]}}}}, {PATH}"), "models.m.remote.prepare"),
    ],
)
def test_what_is_wrong_is_marked_where_it_is(problems, text: str, where: str) -> None:
    assert problems(text), "the parser refuses it, too"
    assert wrong(yaml.safe_load(text)) == {where}


def test_a_model_with_two_servers_is_not_valid(problems) -> None:
    text = one(f"backend: fake, {THERE}")
    assert problems(text)
    assert "models.m" in wrong(yaml.safe_load(text))


VALUES = [
    True, 0, 1, 64, 256, 1 << 20, 1e-9, 0.5, YEAR, "1.5GiB", "64 KiB", "12B", "a", "é b", "x" * 100, "llama_cpp", "debug", "fair", "wait",
    "pipe", "auto", "off", "mean", "q8_0", "resume", "none", "host", "GPU-1", "MIG-GPU-x/1/2", ":80", "*:1", "[::1]:0", "h.example:65535",
    "http://h", "HTTPS://[::1]:9/", ["http://a", "http://b:1/"], "/", "/v1/rerank", "/a;b=c/%41", [], ["host"], ["a", "", "x\ny"], ["/x", "1"],
    ["a", {"path": "b"}, {"path": "c", "scale": -1000}], {}, {"A_.b": "x\ny"},
]  # fmt: skip
_BLOCKS = (POLICY, *BLOCKS.values(), *BLOCKS["remote"].blocks.values())
TABLES = (KINDS, MODEL_KINDS, *(block.kinds for block in _BLOCKS))


@pytest.mark.parametrize(
    "kind", {id(kind): kind for table in TABLES for kind in table.values()}.values(), ids=lambda kind: kind.wanted
)
def test_what_a_kind_of_value_takes_is_valid_and_something_is_not(kind: Kind) -> None:
    taken = [value for value in VALUES if _takes(kind, value)]
    assert taken
    assert [value for value in taken if not Draft202012Validator(kind.schema).is_valid(value)] == []
    assert not all(Draft202012Validator(kind.schema).is_valid(value) for value in VALUES)


def _takes(kind: Kind, value: object) -> bool:
    try:
        kind.read(value)
    except Wrong:
        return False
    return True
