"""What a changed configuration means for a server that runs."""

from pathlib import Path

import msgspec
import pytest

from slimproc.config import Config, load_config
from slimproc.config.model import ModelConfig
from slimproc.reload import IN_PLACE, RESTART, compare

BASE = """
models:
  a: {backend: fake, slots: 2}
  b: {backend: fake}
"""


def load(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "slimproc.yaml"
    file.write_text(text)
    return load_config(file, flags={}, environ={"HOME": str(tmp_path)}, dotenv=None)


def names(found):
    return found.added + found.removed + found.replaced + found.changed


@pytest.fixture
def diff(tmp_path):
    return lambda before, after: compare(load(tmp_path, before), load(tmp_path, after))


def test_the_same_file_changes_nothing(diff):
    found = diff(BASE, BASE)
    assert names(found) == ()
    assert (found.settings, found.restart) == ((), ())


def test_a_comment_and_another_order_of_lines_change_nothing(diff):
    other = "# mine\nmodels:\n  b: {backend: fake}\n\n  a:\n    slots: 2\n    backend: fake\n"
    found = diff(BASE, other)
    assert names(found) == ()


def test_models_come_and_go_by_name(diff):
    found = diff(BASE, BASE.replace("  b:", "  c:"))
    assert (found.added, found.removed, found.replaced, found.changed) == (("c",), ("b",), (), ())


@pytest.mark.parametrize(
    "setting",
    ["aliases: [x]", "unlisted: true", "name: Nice", "pin: true", "ttl: 5", "min_resident: 5", "max_queue: 1",
     "request_timeout: 7", "load_timeout: 7", "unload_timeout: 7", "max_tokens_limit: 7", "on_crash: resume", "inference_path: /v1/completions"],
)  # fmt: skip
def test_what_no_engine_is_made_with_changes_in_place(diff, setting):
    found = diff(BASE, BASE.replace("slots: 2", f"slots: 2, {setting}"))
    assert (found.changed, found.replaced) == (("a",), ())


@pytest.mark.parametrize(
    "setting",
    ["slots: 3", "slots: 2, context: 64", "slots: 2, replicas: 2", "slots: 2, fake: {load_time: 1}",
     "slots: 2, memory: {load_peak: 5, inference_peak: 5}", "slots: 2, device: host", "slots: 2, confine: 'off'"],
)  # fmt: skip
def test_what_an_engine_is_made_with_replaces_the_replicas(diff, setting):
    found = diff(BASE, BASE.replace("slots: 2", setting))
    assert (found.changed, found.replaced) == ((), ("a",))


REMOTE = "models:\n  far: {remote: {base_url: 'http://127.0.0.1:9', contract: none}, inference_path: /x, max_body: 1MiB, request_timeout: 5}\n"


def test_a_remote_models_own_limits_replace_its_replicas_since_its_server_is_asked_with_them(diff):
    text = REMOTE.replace("contract: none}", "contract: control}, memory: {load_peak: 1, inference_peak: 1}")
    assert diff(text, text.replace("request_timeout: 5", "load_timeout: 9, request_timeout: 5")).replaced == ("far",)
    assert diff(text, text.replace("request_timeout: 5", "request_timeout: 6")).changed == ("far",)


def test_another_kind_of_model_under_the_same_name_replaces_it(diff):
    assert diff(REMOTE, "models:\n  far: {backend: fake}\n").replaced == ("far",)


def test_a_top_level_default_changes_every_model_that_has_no_value_of_its_own(diff):
    before = "models:\n  a: {backend: fake}\n  b: {backend: fake, request_timeout: 9}\n"
    found = diff(before, "request_timeout: 5\n" + before)
    assert (found.changed, found.settings) == (("a",), ("request_timeout",))


def test_what_needs_a_restart_is_named_and_keeps_its_old_value(diff):
    found = diff("listen: ':1'\n" + BASE, "listen: ':2'\nring_size: 2MiB\norder: strict\n" + BASE)
    assert (found.restart, found.settings) == (("listen", "ring_size"), ("order",))
    assert (found.config.listen.port, found.config.ring_size, found.config.order) == (1, 1 << 20, "strict")


def test_of_the_memory_block_the_margin_applies_and_the_devices_do_not(diff):
    found = diff("memory: {margin: 1}\n" + BASE, "memory: {margin: 2, devices: [host], host_limit: 9MiB}\n" + BASE)
    assert (found.restart, found.settings) == (("memory.devices", "memory.host_limit"), ("memory",))
    assert (found.config.memory.margin, found.config.memory.devices, found.config.memory.host_limit) == (2, None, None)


def test_the_settings_that_are_named_exist():
    assert set(ModelConfig.__struct_fields__) >= IN_PLACE
    assert set(Config.__struct_fields__) >= set(RESTART)


def test_every_setting_of_a_model_that_is_not_known_to_be_harmless_replaces_it(tmp_path):
    config = load(tmp_path, BASE)
    model = config.models["a"]
    strange = {key: object() for key in ModelConfig.__struct_fields__ if key not in {*IN_PLACE, "name", "origins"}}
    for key, value in strange.items():
        if key in ("load_timeout", "unload_timeout", "prepare_timeout"):
            continue
        other = msgspec.structs.replace(model, **{key: value})
        new = msgspec.structs.replace(config, models=config.models | {"a": other})
        assert compare(config, new).replaced == ("a",), key
