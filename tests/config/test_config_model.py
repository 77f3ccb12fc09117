"""What the parsed configuration answers: which model is meant, where the admin socket is, what an engine gets."""

import os
import stat
from pathlib import Path

import pytest

from slimproc.config import RuntimeDirectory
from slimproc.config.blocks import FAKE_KINDS
from slimproc.config.model import MODEL_KINDS
from slimproc.config.runtime import runtime_directory, state_directory
from slimproc.engines.backend import BACKENDS
from slimproc.errors import ConfigError, InvalidRequest, ModelNotFound
from slimproc.settings import FakeSettings

SEVERAL = """
models:
  org/m:Q4: {backend: fake, aliases: [small, "a b"]}
  n: {backend: fake, unlisted: true}
  ü: {backend: fake}
"""


def test_a_model_is_found_by_its_exact_name_or_alias(load):
    config = load(SEVERAL)
    for called, name in {"org/m:Q4": "org/m:Q4", "small": "org/m:Q4", "a b": "org/m:Q4", "n": "n", "ü": "ü"}.items():
        assert config.resolve_model(called).name == name


@pytest.mark.parametrize("called", ["N", " n", "n ", "Small", "org/m", "m", "*", "u\u0308", "\ud800", "\x00"])
def test_a_name_that_is_only_like_another_is_not_found(load, called):
    with pytest.raises(ModelNotFound) as caught:
        load(SEVERAL).resolve_model(called)
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_the_message_does_not_echo_a_long_name(load):
    with pytest.raises(ModelNotFound) as caught:
        load(SEVERAL).resolve_model("x" * 10_000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("nothing", [None, ""])
def test_no_name_means_the_default_or_the_only_model(load, nothing):
    with pytest.raises(InvalidRequest) as caught:
        load(SEVERAL).resolve_model(nothing)
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert load("default_model: n\n" + SEVERAL).resolve_model(nothing).name == "n"
    assert load("models: {only: {backend: fake}}").resolve_model(nothing).name == "only"


def test_any_name_goes_to_the_model_that_takes_any_after_names_and_aliases(load):
    config = load("models:\n  a: {backend: fake, aliases: ['*']}\n  b: {backend: fake, aliases: [c]}\n")
    assert [config.resolve_model(called).name for called in ("b", "c", "x", "*")] == ["b", "b", "a", "a"]
    with pytest.raises(InvalidRequest):
        config.resolve_model(None)


def test_an_engine_gets_what_its_model_says(load):
    text = "models: {m: {backend: llama_cpp, path: /m.gguf, slots: 2, context: 64, threads: 3, gpu_layers: 0}}"
    settings = load(text).models["m"].engine_settings()
    assert (settings.model, settings.backend, settings.path) == ("m", "llama_cpp", "/m.gguf")
    assert (settings.slots, settings.context, settings.threads, settings.gpu_layers) == (2, 64, 3, 0)


def test_the_backends_of_the_configuration_are_those_of_the_engines():
    assert set(MODEL_KINDS["backend"].wanted.removeprefix("one of ").split(", ")) == set(BACKENDS)


def test_every_fake_setting_has_a_key():
    assert set(FAKE_KINDS) == set(FakeSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("environ", "socket"),
    [
        ({"RUNTIME_DIRECTORY": "/run/slimproc"}, "/run/slimproc/admin.sock"),
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/x"}, "/run/a/admin.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/slimproc/admin-8001.sock"),
        ({"XDG_RUNTIME_DIR": "relative", "TMPDIR": "/t"}, f"/t/slimproc-{os.geteuid()}/admin-8001.sock"),
    ],
)
def test_the_admin_socket_is_systemds_or_the_users_or_in_a_private_directory(load, environ, socket):
    config = load("models: {m: {backend: fake}}", environ=environ)
    assert config.admin_socket_for(8001) == Path(socket)
    assert runtime_directory(environ) == config.runtime


def test_a_configured_admin_socket_is_taken_as_it_is(load, tmp_path):
    assert load("admin_socket: a.sock\nmodels: {m: {backend: fake}}").admin_socket_for(1) == tmp_path / "a.sock"


def test_two_servers_have_two_admin_sockets(load):
    config = load("models: {m: {backend: fake}}")
    assert config.admin_socket_for(1) != config.admin_socket_for(2)


def test_the_runtime_directory_is_made_for_this_user_only(tmp_path):
    directory = RuntimeDirectory(tmp_path / "made")
    directory.create()
    directory.create()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_a_runtime_directory_that_others_could_write_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    file = tmp_path / "file"
    file.touch()
    for path in (open_to_all, link, file, file / "below"):
        with pytest.raises(ConfigError, match=r"link|open|file"):
            RuntimeDirectory(path).create()


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"STATE_DIRECTORY": "/var/lib/slimproc:/other", "XDG_STATE_HOME": "/x"}, "/var/lib/slimproc"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/slimproc"),
        ({"HOME": "/h"}, "/h/.local/state/slimproc"),
    ],
)
def test_the_state_directory_is_systemds_or_the_users(environ, directory):
    assert state_directory(environ) == Path(directory)
