"""slimproc import: what InferSwap and llama-swap say, in our words, and what is lost is told."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimproc.cli.importing import translate
from slimproc.config import Config, load_config
from slimproc.errors import ConfigError

INFERSWAP = """
listen: ":8095"
logLevel: warn
healthCheckTimeout: 100
unloadTimeout: 20
queueTimeout: 170
prepareTimeout: 50
statusTimeout: 4
drainTimeout: 160
maxQueueSize: 9
preload: [asr]
gpu:
  device: "GPU-00000000-0000-0000-0000-000000000000"
  safetyMarginBytes: 1073741824
  maxObservationAge: 3
models:
  asr:
    baseURL: "http://127.0.0.1:8080/"
    name: "Speech 1.10"
    aliases: [speech]
    unlisted: true
    concurrencyLimit: 2
    prepareTimeout: 55
    healthCheckTimeout: 300
    unloadTimeout: 25
    prepare: {argv: ["/opt/asr/prepare", "010"]}
    resourceProfile:
      profileId: card-1
      loadPeakBytes: 22060990464
      inferencePeakBytes: 22060990465
      unloadedResidualBytes: 7
      maxConcurrency: 2
      limits: {rounds: 3}
    inferencePath: /v1/audio/transcriptions
    maxBodyBytes: 1073741824
  vlm: {baseURL: "http://127.0.0.1:8000", inferencePath: /v1/chat/completions, maxBodyBytes: 1, inferencePaths: [/x]}
"""

LLAMA_SWAP = """
healthCheckTimeout: 500
logLevel: debug
startPort: 10001
globalTTL: 30
unloadTimeout: 12
macros:
  server: >
    /opt/llama-server --port ${PORT}
  context: 4096
  sizes: "--ctx-size ${context}"
  models: "${env.MODELS_HERE}/m"
defaults: &defaults
  ttl: 60
  env: ["A=b=c", "KEEP=${HOME}", "CTX=${context}", "nonsense"]
models:
  "org/big:Q4":
    <<: *defaults
    macros: {context: 16384}
    cmd: |
      # ${nothing} in a comment is nothing
      ${server}
      --model ${models}/big.gguf \\
      ${sizes} --alias ${MODEL_ID} --template '{"a": "b c"}'
    name: Big one
    aliases: [gpt-4o-mini]
    checkEndpoint: /ready
    concurrencyLimit: 3
    useModelName: other
    filters: {stripParams: temperature}
  fixed:
    cmd: server --bind 127.0.0.1:8999
    proxy: http://localhost:8999
    ttl: 0
    checkEndpoint: none
    unlisted: true
    unloadTimeout: 99
  box:
    cmd: docker run --rm -p ${PORT}:8080 image
    cmdStop: docker stop box
    proxy: "http://127.0.0.1:${PORT}/api"
  far: {cmd: ssh somewhere start, proxy: "http://10.0.0.1:8000"}
  mute: {cmd: server --quiet}
groups:
  kept: {persistent: true, swap: false, exclusive: false, members: [fixed, nosuch]}
  others: {members: [box]}
hooks: {on_startup: {preload: [gpt-4o-mini, nosuch, "org/big:Q4"], profile: p}}
apiKeys: [secret]
peers: {a: {proxy: "http://x", models: [y]}}
"""


def imported(tmp_path: Path, text: str, **environ: str) -> tuple[Config, list[str]]:
    """The configuration that our own loader makes of it, with whatever stands in this test's environment."""
    (tmp_path / "theirs.yaml").write_text(text, "utf-8")
    ours, notes = translate(tmp_path / "theirs.yaml", environ)
    (tmp_path / "ours.yaml").write_text(ours, "utf-8")
    config = load_config(tmp_path / "ours.yaml", flags={}, environ={}, dotenv=None, unmeasured=True)
    return config, notes


def refused(tmp_path: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, text, **environ)
    message = str(caught.value)
    assert all(line.isprintable() for line in message.splitlines())
    return message.replace(f"{tmp_path}/", "")


# --- InferSwap --------------------------------------------------------------------------------------------------------


def test_a_configuration_of_inferswap_becomes_one_of_ours(tmp_path):
    config, _ = imported(tmp_path, INFERSWAP)
    assert str(config.listen) == ":8095"
    assert (config.log_level, config.order, config.preload, config.max_queue_total) == (
        "warning",
        "strict",
        ("asr",),
        9,
    )
    limits = (config.load_timeout, config.unload_timeout, config.queue_timeout, config.prepare_timeout)
    assert limits == (100, 20, 170, 50)
    assert (config.status_timeout, config.drain_timeout, config.shutdown_timeout) == (4, 160, 60)
    assert (config.memory.margin, config.memory.max_sample_age) == (1 << 30, 3)
    assert config.memory.devices == ("GPU-00000000-0000-0000-0000-000000000000",)
    asr = config.models["asr"]
    assert asr.remote.base_urls == ("http://127.0.0.1:8080",)
    assert (asr.remote.contract, asr.remote.prepare) == ("control", ("/opt/asr/prepare", "010"))
    assert (asr.display_name, asr.aliases, asr.unlisted, asr.concurrency) == ("Speech 1.10", ("speech",), True, 2)
    assert (asr.load_timeout, asr.unload_timeout, asr.prepare_timeout) == (300, 25, 55)
    assert (asr.inference_path, asr.max_body) == ("/v1/audio/transcriptions", 1 << 30)
    memory = asr.memory
    assert (memory.load_peak, memory.inference_peak, memory.residual) == (22060990464, 22060990465, 7)
    assert (memory.max_concurrency, memory.profile_id) == (2, "card-1")


def test_what_inferswap_measured_is_told_to_be_an_upper_bound_and_what_it_did_not_to_be_missing(tmp_path):
    config, notes = imported(tmp_path, INFERSWAP)
    assert any(note.startswith("the peaks of asr: taken as upper bounds: ") for note in notes)
    assert any(note.startswith("models.vlm: unmeasured: `slimproc measure` has to write its memory") for note in notes)
    assert config.models["vlm"].memory is None
    assert "models.vlm.inferencePaths: not carried over" in notes
    assert "models.asr.resourceProfile.limits: not carried over: it is for people" in notes


def test_where_inferswap_has_another_default_it_is_written_out(tmp_path):
    config, _ = imported(
        tmp_path, "models: {a: {baseURL: 'http://h:1', inferencePath: /x, maxBodyBytes: 1, prepareTimeout: 9}}"
    )
    assert str(config.listen) == ":8080"
    assert (config.memory.margin, config.shutdown_timeout) == (0, 60)
    assert config.models["a"].prepare_timeout == 60


# --- llama-swap -------------------------------------------------------------------------------------------------------


def test_a_configuration_of_llama_swap_becomes_one_of_ours(tmp_path):
    config, _ = imported(tmp_path, LLAMA_SWAP, MODELS_HERE="/data")
    assert list(config.models) == ["org/big:Q4", "fixed", "box"]
    assert (config.log_level, config.load_timeout, config.unload_timeout) == ("debug", 500, 12)
    assert config.preload == ("org/big:Q4",)
    big, fixed, box = config.models.values()
    assert big.command.argv == (
        "/opt/llama-server", "--port", "${PORT}", "--model", "/data/m/big.gguf", "--ctx-size", "16384",
        "--alias", "org/big:Q4", "--template", '{"a": "b c"}',
    )  # fmt: skip
    assert big.command.env == {"A": "b=c", "KEEP": "${HOME}", "CTX": "16384"}
    assert (big.command.ready_path, big.display_name, big.aliases) == ("/ready", "Big one", ("gpt-4o-mini",))
    assert (big.ttl, big.concurrency, big.pin) == (60, 3, False)
    assert fixed.command.argv == ("server", "--bind", "127.0.0.1:${PORT}")
    assert (fixed.ttl, fixed.unlisted, fixed.pin, fixed.concurrency) == (None, True, True, 10)
    assert (fixed.command.ready_path, fixed.unload_timeout) == ("/health", 99)
    assert (box.ttl, box.command.argv[4], box.unload_timeout) == (30, "${PORT}:8080", 12)
    assert all(model.memory is None for model in config.models.values())


def test_what_llama_swap_has_and_we_do_not_is_told(tmp_path):
    _, notes = imported(tmp_path, LLAMA_SWAP, MODELS_HERE="/data")
    told = dict(note.split(": ", 1) for note in notes)
    for key in ("useModelName", "filters"):
        assert told[f"models.org/big:Q4.{key}"].startswith("not carried over")
    assert "NAME=VALUE" in told["models.org/big:Q4.env[3]"]
    assert "port 8999" in told["models.fixed.cmd"]
    assert "ready_path" in told["models.fixed.checkEndpoint"]
    assert "SIGTERM" in told["models.box.cmdStop"]
    assert "container" in told["models.box.cmd"]
    assert "'/api'" in told["models.box.proxy"]
    assert told["models.far"].startswith("left out: its server is somewhere else")
    assert told["models.mute"].startswith("left out: nothing in its cmd says the port")
    assert "pinned" in told["groups.kept"]
    assert "decided by bytes" in told["groups.others"]
    for key in ("hooks.on_startup.profile", "apiKeys", "peers", "startPort", "defaults"):
        assert told[key].startswith("not carried over"), key
    assert told["${env.MODELS_HERE}"] == "written out as the environment has it now"
    assert told["org/big:Q4, fixed, box"].startswith("unmeasured: `slimproc measure`")
    assert "secret" not in "\n".join(notes)


def test_groups_may_stand_under_routing(tmp_path):
    text = "models: {a: {cmd: 'x ${PORT}'}}\nrouting: {router: {use: group, settings: {groups: {g: {persistent: true, members: [a]}}}}, scheduler: {use: fifo}}"
    config, notes = imported(tmp_path, text)
    assert config.models["a"].pin is True
    assert "routing.scheduler: not carried over" in notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("macros: {a: '${b}', b: '${a}'}\nmodels: {m: {cmd: 'x ${PORT} ${a}'}}", "models.m.cmd: the macro 'a' is made of itself"),
        ("macros: {a: '${a}'}\nmodels: {m: {cmd: 'x ${a}'}}", "models.m.cmd: the macro 'a' is made of itself"),
        ("models: {m: {cmd: 'x ${PORT} ${nosuch}'}}", "models.m.cmd: there is no macro 'nosuch'"),
        ("models: {m: {cmd: 'x ${env.NO_SUCH}'}}", "models.m.cmd: the environment variable NO_SUCH is not set"),
        ("macros: {'a b': c}\nmodels: {m: {cmd: x}}", "macros: a macro cannot be called 'a b'"),
        ("macros: {a: [b]}\nmodels: {m: {cmd: x}}", "macros.a: wanted text, not a list"),
        ("models: {m: {cmd: \"x 'y\"}}", "models.m.cmd: no closing quotation"),
        ("models: {m: {cmd: '# nothing'}}", "models.m.cmd: wanted a command, not '# nothing'"),
        ("models: {m: {cmd: }}", "models.m.cmd: wanted a command, not nothing"),
        ("models: {m: {cmd: [x]}}", "models.m.cmd: wanted text, not a list"),
        ("models: {m: {cmd: 'x ${PORT}', ttl: soon}}", "models.m.ttl: wanted a number, not 'soon'"),
        ("models: {m: {cmd: 'x ${PORT}', ttl: 1e999}}", "models.m.ttl: wanted a number, not '1e999'"),
        ("models: {m: {cmd: 'x ${PORT}', unlisted: maybe}}", "models.m.unlisted: wanted true or false, not 'maybe'"),
        ("models: {m: {cmd: 'x ${PORT}', env: {A: b}}}", "models.m.env: wanted a list of texts, not a mapping"),
        ("models: {m: {cmd: 'x ${PORT}', aliases: [[a]]}}", "models.m.aliases: wanted a list of texts, not a list of other things"),
        ("models: {m: {cmd: 'x ${PORT}', proxy: 'http://['}}", "models.m.proxy: wanted a URL, not 'http://['"),
        ("models: {m: {cmd: 'x ${PORT}', proxy: 'ftp://h'}}", "models.m.proxy: wanted a URL, not 'ftp://h'"),
        ("models: {m: {cmd: 'x'}}", "none of its models can be carried over: models.m: left out: "),
        ("models: {m: {cmd: 'x ${PORT}', checkEndpoint: health}}", "cannot be carried over: models.m.command.ready_path: wanted a path"),
        ("models: {m: {cmd: 'x ${PORT}', aliases: [m]}}", "cannot be carried over: models.m.aliases: alias 'm' is a model's name"),
        ("models: {m: {cmd: 'x ${PORT}', concurrencyLimit: 1.5}}", "cannot be carried over: models.m.concurrency: wanted an integer"),
        ("models: {m: {cmd: 'x ${PORT}'}}\ngroups: [a]", "groups: wanted a mapping, not a list"),
        ("models: {a: {cmd: x}, b: {baseURL: y}}", "it has models of llama-swap (cmd) and of InferSwap (baseURL)"),
        ("models: {a: {backend: fake}}", "this is a configuration of slimproc already"),
        ("models: {a: {}}", "wanted a configuration of InferSwap (models with baseURL) or of llama-swap (models with cmd)"),
        ("models: {}", "wanted a configuration of InferSwap"),
        ("models: [a]", "models: wanted a mapping, not a list"),
        ("models: {a: }", "models.a: wanted a mapping, not nothing"),
        ("a: b", "wanted a configuration of InferSwap"),
        ("", "wanted a mapping of settings"),
        ("[a]", "wanted a mapping of settings"),
        ("gpu: {}\nmodels: {}", "cannot be carried over: models: wanted a mapping with at least one model"),
        ("models: {a: {baseURL: 'http://h:1/x', inferencePath: /x, maxBodyBytes: 1}}", "cannot be carried over: models.a.remote.base_url: wanted http://HOST:PORT and nothing"),
        ("models: {a: {baseURL: 'http://h:1', inferencePath: /control/load, maxBodyBytes: 1}}", "models.a.inference_path: '/control/load' is a control path"),
        ("models: {a: {baseURL: 'http://h:1', maxBodyBytes: 1}}", "models.a: its inference_path is missing"),
        ("models: {a: {baseURL: 'http://h:1', inferencePath: /x, maxBodyBytes: 1GiB}}", "models.a.maxBodyBytes: wanted a number, not '1GiB'"),
        ("models: {a: {baseURL: 'http://h:1', resourceProfile: 7}}", "models.a.resourceProfile: wanted a mapping, not '7'"),
        ("preload: x\ngpu: {}", "preload: wanted a list of texts, not 'x'"),
        ("a: [b", "not valid YAML: "),
        ("a: 1\na: 2\ngpu: {}", "not valid YAML: the key 'a' is there twice on line 1"),
        ("a: !!python/object:os.system x", "not valid YAML: could not determine a constructor for the tag"),
        ("a: !!binary eA==", "not valid YAML: could not determine a constructor"),
        ("? [a]\n: b", "not valid YAML: found unhashable key"),
        ("a: '\x01'", "not valid YAML: a control character is not allowed here"),
        ("a: &x [*x]\ngpu: {}", "nested too deeply"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("# " + "x" * (1 << 20), "longer than 1048576 characters: this is no configuration"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_one_clear_error(tmp_path, text, message):
    found = refused(tmp_path, text)
    assert found.startswith("theirs.yaml: ")
    assert message in found


def doubled(line: str) -> str:
    """Twenty-five generations, each twice the one before."""
    return "\n".join(line.format(this=n, before=n - 1) for n in range(1, 26))


def test_macros_that_double_each_other_do_not_grow_without_bound(tmp_path):
    lines = "\n".join(f"  m{n}: '${{m{n - 1}}}${{m{n - 1}}}'" for n in range(1, 40))
    text = f"macros:\n  m0: '0123456789'\n{lines}\nmodels: {{a: {{cmd: 'x ${{PORT}} ${{m39}}'}}}}"
    assert "models.a.cmd: longer than 65536 characters" in refused(tmp_path, text)


def test_macros_inside_macros_have_a_depth(tmp_path):
    lines = "\n".join(f"  m{n}: '${{m{n - 1}}}'" for n in range(1, 400))
    text = f"macros:\n  m0: y\n{lines}\nmodels: {{a: {{cmd: 'x ${{PORT}} ${{m399}}'}}}}"
    assert "models.a.cmd: macros inside macros go too deep" in refused(tmp_path, text)


def test_aliases_that_double_each_other_are_refused(tmp_path):
    text = "a0: &a0 [x]\n" + doubled("a{this}: &a{this} [*a{before}, *a{before}]") + "\ngpu: {}"
    assert "it has more than 100000 values: this is no configuration" in refused(tmp_path, text)


def test_merge_keys_cannot_make_it_grow_without_bound(tmp_path):
    """Older PyYAMLs double at each step, and are stopped; newer ones merge an entry once."""
    twice = "a0: &a0 {x: y}\n" + doubled("a{this}: &a{this} {{<<: [*a{before}, *a{before}]}}") + "\ngpu: {}"
    assert "merge keys make it too large" in (found := refused(tmp_path, twice)) or "models" in found
    many = f"a: &a {{x: y}}\nb: {{<<: [{', '.join(['*a'] * 65)}]}}\ngpu: {{}}"
    assert "a merge key names too much" in refused(tmp_path, many)
    assert "models" in refused(tmp_path, "a: &a {<<: *a, x: y}\ngpu: {}")


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_is_printed_or_written_and_what_is_to_be_known_is_on_top_and_on_stderr(slimproc, here):
    (here / "is.yaml").write_text(INFERSWAP)
    printed = slimproc("import", "is.yaml")
    assert printed.status == 0
    assert printed.out.startswith("# Made by `slimproc import` from a configuration of InferSwap.\n# - order: strict, ")
    assert [f"# - {line}" for line in printed.err.splitlines()] == printed.out.splitlines()[
        1 : 1 + printed.err.count("\n")
    ]
    written = slimproc("import", "is.yaml", "--to", "slimproc.yaml")
    assert (written.status, written.out) == (0, "")
    assert (here / "slimproc.yaml").read_text("utf-8") == printed.out
    again = slimproc("import", "is.yaml", "--to", "slimproc.yaml")
    assert (again.status, again.out) == (1, "")
    assert again.err == "slimproc: cannot write slimproc.yaml: File exists\n"


def test_a_measured_configuration_of_inferswap_serves_as_it_is(slimproc, here):
    (here / "is.yaml").write_text(INFERSWAP.partition("  vlm:")[0])
    slimproc("import", "is.yaml", "--to", "ours.yaml")
    assert slimproc("check-config", "ours.yaml").status == 0


def test_an_unmeasured_one_is_refused_by_check_config_with_what_to_do(slimproc, here):
    (here / "ls.yaml").write_text("models: {m: {cmd: 'x ${PORT}'}}")
    slimproc("import", "ls.yaml", "--to", "ours.yaml")
    result = slimproc("check-config", "ours.yaml")
    assert result.status == 78
    assert "models.m: its memory is missing: `slimproc measure m` measures it and writes it" in result.err


def test_a_wrong_file_is_an_error_and_writes_nothing(slimproc, here):
    (here / "x.yaml").write_text("models: {m: {cmd: x}}")
    for file, message in {
        "x.yaml": "x.yaml: none of its models",
        "no.yaml": "no.yaml: cannot read the configuration: No",
    }.items():
        result = slimproc("import", file, "--to", "ours.yaml")
        assert (result.status, result.out) == (78, "")
        assert result.err.startswith(message)
    assert not (here / "ours.yaml").exists()


# --- whatever stands there --------------------------------------------------------------------------------------------

words = st.sampled_from(
    ["x", "x ${PORT}", "${a}", "${env.X}", "http://h:1", "http://localhost:8999", "/p", "7", "-1", "true", "no", "none", "", "\ud800", "\u2028", "1e3", "a: b", "'"]
)  # fmt: skip
anything = st.recursive(st.none() | words | st.integers() | st.booleans(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=5)  # fmt: skip
SWAP_KEYS = ["cmd", "proxy", "aliases", "ttl", "unlisted", "checkEndpoint", "env", "macros", "concurrencyLimit", "name"]
INFER_KEYS = ["baseURL", "prepare", "resourceProfile", "inferencePath", "maxBodyBytes", "prepareTimeout", "aliases"]
TOP_KEYS = ["macros", "groups", "hooks", "routing", "globalTTL", "logLevel", "listen", "preload", "maxQueueSize", "x"]


def a_file(models: list[dict[str, object]], keys: list[str]) -> st.SearchStrategy[dict[str, object]]:
    """One of ``models`` with some values changed, under top-level settings of which one may be changed."""
    model = st.builds(
        lambda model, changed: {**model, **changed},
        st.sampled_from(models),
        st.dictionaries(st.sampled_from(keys), anything, max_size=1),
    )
    return st.builds(
        lambda top, models: {**top, "models": models},
        st.dictionaries(st.sampled_from(TOP_KEYS), anything, max_size=1),
        st.dictionaries(words, model, min_size=1, max_size=2),
    )


whole = st.one_of(
    a_file([{"cmd": "x ${PORT}"}, {"cmd": "x 8999", "proxy": "http://localhost:8999"}], SWAP_KEYS),
    a_file([{"baseURL": "http://h:1", "inferencePath": "/x", "maxBodyBytes": 1}], INFER_KEYS),
    st.dictionaries(st.sampled_from([*TOP_KEYS, "gpu", "models"]), anything, max_size=3),
)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=whole)
def test_anything_becomes_a_configuration_that_loads_or_an_error_of_printable_lines(tmp_path, data):
    try:
        config, lines = imported(tmp_path, yaml.safe_dump(data, allow_unicode=False), X="y")
    except ConfigError as error:
        lines = str(error).splitlines()
    else:
        assert config.models
    assert all(line.isprintable() for line in lines)
