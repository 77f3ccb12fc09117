"""Models that are served by other servers than our engines: what they need, what they refuse, and what must differ."""

import pytest

from slimproc.config import Command, MemoryProfile, Remote

MEMORY = "memory: {load_peak: 2GiB, inference_peak: 3GiB, residual: 1MiB, max_concurrency: 2, profile_id: here}"
REMOTE = 'remote: {base_url: "http://127.0.0.1:8080", prepare: {argv: [/opt/prepare, -x]}}'
COMMAND = 'command: {argv: [server, --port, "${PORT}"], env: {A: b}, ready_path: /ready}'
PATH = "inference_path: /align, max_body: 1GiB"
THERE = 'remote: {base_url: "http://127.0.0.1:8080", contract: none}'
GOOD = [f"{REMOTE}, {PATH}, {MEMORY}", f"{COMMAND}, {PATH}, {MEMORY}", f"{THERE}, {PATH}"]


def one(text: str) -> str:
    return f"models: {{m: {{{text}}}}}\n"


def test_a_remote_model_has_a_server_a_path_a_limit_and_a_measured_peak(load):
    model = load(
        one(f"{GOOD[0]}, concurrency: 2, prepare_timeout: 7, pin: true, ttl: 9, min_resident: 4, device: GPU-1")
    )
    model = model.models["m"]
    assert model.backend is None
    assert (
        model.upstream == model.remote == Remote(base_urls=("http://127.0.0.1:8080",), prepare=("/opt/prepare", "-x"))
    )
    assert model.memory == MemoryProfile(
        load_peak=2 << 30, inference_peak=3 << 30, residual=1 << 20, max_concurrency=2, profile_id="here"
    )
    assert (model.inference_path, model.max_body, model.concurrency) == ("/align", 1 << 30, 2)
    assert (model.pin, model.ttl, model.min_resident, model.device) == (True, 9.0, 4.0, "GPU-1")
    assert (model.prepare_timeout, model.load_timeout, model.managed) == (7.0, 120.0, True)


def test_a_command_model_has_a_command(load, tmp_path):
    model = load(one(GOOD[1])).models["m"]
    assert (
        model.upstream
        == model.command
        == Command(argv=("server", "--port", "${PORT}"), env={"A": "b"}, ready_path="/ready")
    )
    assert (model.remote, model.backend, model.managed) == (None, None, True)


@pytest.mark.parametrize(
    ("written", "program"),
    [
        ("server", "server"),
        ("/opt/server", "/opt/server"),
        ("./server", "{here}/server"),
        ("~/server", "{here}/home/server"),
    ],
)
def test_a_commands_program_is_found_by_path_or_from_the_files_directory(load, tmp_path, written, program):
    text = f'command: {{argv: ["{written}", "${{PORT}}"]}}, {PATH}, {MEMORY}'
    assert load(one(text)).models["m"].command.argv == (program.format(here=tmp_path), "${PORT}")


def test_a_server_that_is_simply_there_has_no_memory(load):
    model = load(one(GOOD[2])).models["m"]
    assert (model.remote.contract, model.remote.health_path) == ("none", "/health")
    assert (model.memory, model.managed) == (None, False)


def test_several_base_urls_are_several_replicas(load):
    text = one(f'remote: {{base_url: ["http://a:1/", "http://b:1"]}}, {PATH}, {MEMORY}')
    model = load(text).models["m"]
    assert (model.remote.base_urls, model.replicas) == (("http://a:1", "http://b:1"), 2)


def test_only_the_total_bounds_the_queue_of_an_upstream_that_does_not_say(load):
    assert load(one(GOOD[0])).models["m"].max_queue == 256
    assert load("max_queue_total: 9\n" + one(GOOD[1])).models["m"].max_queue == 9
    assert load(one(f"{GOOD[2]}, max_queue: 3")).models["m"].max_queue == 3
    assert load(one("backend: fake")).models["m"].max_queue == 32


def test_it_is_known_whether_a_time_limit_is_the_models_own(load):
    text = f"request_timeout: 5\nmodels:\n  a: {{{GOOD[2]}}}\n  b: {{{GOOD[1]}, request_timeout: 7}}\n"
    a, b = load(text).models.values()
    assert (a.request_timeout, b.request_timeout) == (5.0, 7.0)
    assert ("request_timeout" in a.origins, "request_timeout" in b.origins) == (False, True)


@pytest.mark.parametrize("text", [GOOD[0], GOOD[1]])
def test_an_unmeasured_upstream_is_refused_with_what_to_do_unless_it_is_to_be_measured(load, problems, text):
    text = text.removesuffix(f", {MEMORY}")
    advice = "`slimproc measure m` measures it and writes it"
    assert problems(one(text)) == [f"slimproc.yaml:1: models.m: its memory is missing: {advice}"]
    assert load(one(text), unmeasured=True).models["m"].memory is None
    assert load(one(f"{text}, concurrency: 4"), unmeasured=True).models["m"].concurrency == 4
    assert load(one(f"{text}, {MEMORY}"), unmeasured=True).models["m"].memory is not None


def test_the_advice_can_be_pasted_into_a_shell_whatever_the_name(problems):
    (line,) = problems(f"models: {{'a b': {{{REMOTE}, {PATH}}}}}")
    assert "`slimproc measure 'a b'`" in line


def test_a_local_model_may_be_measured_too(load):
    model = load(one(f"backend: fake, {MEMORY}, device: host, pin: true, ttl: 1")).models["m"]
    assert (model.memory.load_peak, model.device, model.upstream, model.managed) == (2 << 30, "host", None, True)
    assert model.inference_path == "/v1/chat/completions"
    for path in ("/v1/completions", "/v1/embeddings", "/v1/rerank"):
        assert load(one(f"backend: fake, inference_path: {path}")).models["m"].inference_path == path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"backend: fake, {REMOTE}", ".remote: a model is served by one: backend or remote"),
        (f"{COMMAND}, {REMOTE}, {PATH}, {MEMORY}", ".command: a model is served by one: remote or command"),
        ("backend: fake, concurrency: 2", ".concurrency: only a model with remote or command takes it"),
        ("backend: fake, max_body: 1MiB", ".max_body: only a model with remote or command takes it"),
        ("backend: fake, prepare_timeout: 1", ".prepare_timeout: only a model with remote or command takes it"),
        ("backend: fake, inference_path: /align", ".inference_path: a local model answers one of /v1/chat/completions, /v1/"),
        ("backend: fake, inference_path: /control", ".inference_path: '/control' is a control path"),
        *[
            (f"{GOOD[0]}, {key}", f".{key.partition(':')[0]}: only a model with a backend takes it, and this one has remote")
            for key in ("path: /x", "replicas: 2", "slots: 2", "context: 64", "threads: 1", "gpu_layers: 1", "pooling: cls",
                        "chat_template: /dev/null", "max_tokens_limit: 3", "lora: [x]", "kv_type: f16", "mmap: true",
                        "flash_attention: true", "speculation: 0", "fake: {}")
        ],
        (f"{GOOD[1]}, slots: 2", ".slots: only a model with a backend takes it, and this one has command"),
        (f"{GOOD[1]}, prepare_timeout: 2", ".prepare_timeout: this model has no remote.prepare"),
        (f"{GOOD[2]}, prepare_timeout: 2", ".prepare_timeout: this model has no remote.prepare"),
        *[
            (f"{GOOD[2]}, {key}", f".{key.partition(':')[0]}: with contract: none the model is neither loaded nor unloaded")
            for key in (MEMORY, "pin: true", "ttl: 1", "min_resident: 1", "device: host", "load_timeout: 1", "unload_timeout: 1")
        ],
        (f"{REMOTE}, max_body: 1MiB, {MEMORY}", ": its inference_path is missing: wanted a path that begins with /"),
        (f"{REMOTE}, inference_path: /x, {MEMORY}", ": its max_body is missing: wanted a size in bytes"),
        (f"{REMOTE}, {MEMORY}, inference_path: '/a?b', max_body: 1", ".inference_path: a path has no query"),
        (f"{REMOTE}, {MEMORY}, inference_path: [/a], max_body: 1", ".inference_path: wanted one path, not a list"),
        (f"{REMOTE}, {MEMORY}, inference_path: /a, max_body: 0", ".max_body: wanted a size in bytes"),
        (f"{GOOD[0]}, concurrency: 3", ".concurrency: it was measured with at most 2 at once (memory.max_concurrency)"),
        (f"{GOOD[0]}, concurrency: true", ".concurrency: wanted an integer from 1 to 4096, not true"),
        (f"{GOOD[0]}, concurrency: 0", ".concurrency: wanted an integer from 1 to 4096, not 0"),
        (f"{GOOD[0]}, ttl: 0", ".ttl: wanted a number of seconds above 0"),
        (f"{GOOD[0]}, ttl: .nan", ".ttl: wanted a number of seconds above 0"),
        (f"{GOOD[0]}, min_resident: -1", ".min_resident: wanted a number of seconds from 0"),
        (f"{GOOD[0]}, pin: 1", ".pin: wanted true or false, not 1"),
        (f"{GOOD[0]}, device: 0", ".device: wanted host, or the UUID of a GPU"),
        (f"{GOOD[0]}, device: cuda", ".device: wanted host, or the UUID of a GPU"),
        (f"{GOOD[0]}, status_timeout: 1", ".status_timeout: a model has none of its own: set it at the top level"),
        (f"{GOOD[0]}, drain_timeout: 1", ".drain_timeout: a model has none of its own"),
        (f"{GOOD[0]}, queue_timeout: 1", ".queue_timeout: a model has none of its own"),
        (f"{GOOD[0]}, order: fair", ".order: a model has none of its own"),
        (f"{GOOD[0]}, base_url: x", ".base_url: set it inside the model's remote block: remote.base_url"),
        (f"{GOOD[0]}, prepare: x", ".prepare: set it inside the model's remote block: remote.prepare"),
        (f"{GOOD[0]}, argv: x", ".argv: set it inside the model's command block: command.argv"),
        (f"{GOOD[0]}, load_peak: 1", ".load_peak: set it inside the model's memory block: memory.load_peak"),
        (f"{GOOD[0]}, inference_paths: [/a]", ".inference_paths: unknown setting; did you mean inference_path?"),
        (f"{GOOD[0]}, nosuch: 1", ".nosuch: unknown setting"),
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_model_or_with_a_wrong_value_is_named(problems, text, message):
    (line,) = problems(one(text))
    assert line.startswith(f"slimproc.yaml:1: models.m{message}")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("remote: x", "remote: wanted a mapping of the remote server's settings, not 'x'"),
        ("remote: {}", "remote: its base_url is missing: wanted http://HOST:PORT, or a list of such"),
        ("remote: {base_url: h}", "remote.base_url: wanted http://HOST:PORT, not 'h'"),
        ("remote: {base_url: 'http://h:1', contract: both}", "remote.contract: wanted one of control, none, not 'both'"),
        ("remote: {base_url: 'http://h:1', contrct: none}", "remote.contrct: unknown setting; did you mean contract?"),
        ("remote: {base_url: 'http://h:1', health_path: /h}", "remote.health_path: it is asked for with contract: none only"),
        ("remote: {base_url: 'http://h:1', prepare: /p}", "remote.prepare: wanted a mapping of the preparation's settings, not '/p'"),
        ("remote: {base_url: 'http://h:1', prepare: {}}", "remote.prepare: its argv is missing: wanted a list of texts"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: []}}", "remote.prepare.argv: wanted a list of texts, the program and"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: /p}}", "remote.prepare.argv: wanted a list of texts, the program and"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: [p]}}", "remote.prepare.argv: item 1: wanted the program's absolute path, not 'p'"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: [./p]}}", "remote.prepare.argv: item 1: wanted the program's absolute path"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: [~/p]}}", "remote.prepare.argv: item 1: wanted the program's absolute path"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: [/p, 1]}}", "remote.prepare.argv: item 2: wanted text, not 1: quote it"),
        ("remote: {base_url: 'http://h:1', prepare: {argv: [/p], env: {}}}", "remote.prepare.env: unknown setting"),
        ("command: [a]", "command: wanted a mapping of the command's settings, not a list"),
        ("command: {}", "command: its argv is missing: wanted a list of texts, the program and its arguments"),
        ("command: {argv: [a, b]}", "command.argv: no argument has ${PORT} in it"),
        ("command: {argv: ['${PORT}']}", "command.argv: no argument has ${PORT} in it"),
        ("command: {argv: ['', '${PORT}']}", "command.argv: item 1: wanted the program, not an empty text"),
        ("command: {argv: [a, '${PORT}', {}]}", "command.argv: item 3: wanted text, not a mapping"),
        ('command: {argv: [a, "${PORT}\\0"]}', "command.argv: item 2: a NUL, or bytes that are not UTF-8"),
        ("command: {argv: [a, '${PORT}'], env: [a]}", "command.env: wanted a mapping of texts, not a list"),
        ("command: {argv: [a, '${PORT}'], env: {A: 1}}", "command.env: A: wanted text, not 1: quote it"),
        ("command: {argv: [a, '${PORT}'], env: {A=: b}}", "command.env: 'A=' cannot be an environment variable's name"),
        ("command: {argv: [a, '${PORT}'], ready_path: health}", "command.ready_path: wanted a path that begins with /"),
    ],
)  # fmt: skip
def test_a_wrong_server_is_named_with_its_place(problems, block, message):
    (line,) = problems(one(f"{block}, {PATH}, {MEMORY}"))
    assert line.startswith(f"slimproc.yaml:1: models.m.{message}")


def test_a_program_may_be_told_its_port_in_the_environment(load):
    model = load(one(f"command: {{argv: [a], env: {{PORT: '${{PORT}}'}}}}, {PATH}, {MEMORY}")).models["m"]
    assert model.command.env == {"PORT": "${PORT}"}


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("7", ": wanted a mapping of what the model was measured to need, not 7"),
        ("{inference_peak: 1}", ": its load_peak is missing: wanted a size in bytes"),
        ("{load_peak: 1}", ": its inference_peak is missing: wanted a size in bytes"),
        ("{load_peak: -1, inference_peak: 1}", ".load_peak: wanted a size in bytes"),
        ("{load_peak: true, inference_peak: 1}", ".load_peak: wanted a size in bytes"),
        ("{load_peak: 1.5, inference_peak: 1}", ".load_peak: wanted a size in bytes"),
        ("{load_peak: 1, inference_peak: 2, residual: 3}", ".residual: what stays after an unload is more than the peaks: at most 2"),
        ("{load_peak: 1, inference_peak: 1, max_concurrency: 0}", ".max_concurrency: wanted an integer from 1"),
        ("{load_peak: 1, inference_peak: 1, profile_id: 7}", ".profile_id: wanted text, not 7: quote it"),
        ("{load_peak: 1, inference_peak: 1, peak: 7}", ".peak: unknown setting"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_named_with_its_key(problems, memory, message):
    for model in ("backend: fake", f"{REMOTE}, {PATH}"):
        (line,) = problems(one(f"{model}, memory: {memory}"))
        assert line.startswith(f"slimproc.yaml:1: models.m.memory{message}")


def test_a_key_inside_a_block_has_its_own_line(problems):
    text = f"models:\n  m:\n    remote:\n      base_url: x\n      prepare:\n        argv: [p]\n    {PATH.replace(', ', chr(10) + '    ')}\n    {MEMORY}\n"
    assert [line.split(" ")[0] for line in problems(text)] == ["slimproc.yaml:4:", "slimproc.yaml:6:"]


# --- between models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/"),
        ("http://localhost:8080", "http://[::1]:8080"),
        ("http://HOST", "http://host:80"),
    ],
)
def test_two_models_on_one_base_url_are_refused(problems, first, second):
    text = f"models:\n  a: {{remote: {{base_url: '{first}'}}, {PATH}, {MEMORY}}}\n  b: {{remote: {{base_url: ['http://x:1', '{second}'], contract: none}}, {PATH}}}\n"
    (line,) = problems(text)
    assert line.startswith("slimproc.yaml:3: models.b.remote.base_url: ")
    assert line.endswith(" is the server of 'a' already: each model needs its own")


def test_a_base_url_where_slimproc_itself_listens_is_refused(load, problems):
    text = one(f'remote: {{base_url: "http://localhost:8000"}}, {PATH}, {MEMORY}')
    end = "models.m.remote.base_url: http://localhost:8000 is where slimproc itself listens "
    assert problems(text) == [f"slimproc.yaml:1: {end}(127.0.0.1:8000)"]
    assert problems('listen: ":8000"\n' + text) == [f"slimproc.yaml:2: {end}(:8000)"]
    assert load('listen: ":8095"\n' + text).models["m"].remote
    assert load("listen: 10.0.0.1:8000\n" + text).models["m"].remote


def test_the_models_to_preload_exist_once_and_can_be_loaded(load, problems):
    models = f"models:\n  a: {{backend: fake, aliases: [x]}}\n  b: {{{GOOD[1]}}}\n  c: {{{GOOD[2]}}}\n"
    assert load("preload: [b, a]\n" + models).preload == ("b", "a")
    assert load("preload: []\n" + models).preload == ()
    assert load(models).preload is None
    for wrong, message in {
        "[a, x]": "there is no model 'x'; it is an alias of 'a'",
        "[nosuch]": "there is no model 'nosuch'; there are 'a', 'b', 'c'",
        "[a, a]": "item 2: 'a' is in the list before",
        "[c]": "'c' is a server with contract: none, which is not loaded here",
        "a": "wanted a list of models' names, not 'a'",
        "[7]": "item 1: wanted text, not 7: quote it",
    }.items():
        assert problems(f"preload: {wrong}\n" + models) == [f"slimproc.yaml:1: preload: {message}"]


def test_a_model_is_on_a_device_that_may_be_used(load, problems):
    models = one("backend: fake, device: GPU-1")
    assert load("memory: {devices: [host, GPU-1]}\n" + models).memory.devices == ("host", "GPU-1")
    assert problems("memory: {devices: [host]}\n" + models) == [
        "slimproc.yaml:2: models.m.device: memory.devices leaves 'GPU-1' out: it has host"
    ]


def test_a_device_and_those_that_may_be_used_are_abbreviated_as_one_likes(load, problems):
    """Which GPU is meant is known when it is known which there are."""
    for device, listed in (("GPU-ab", "GPU-abcd-1"), ("GPU-abcd-1", "GPU-ab"), ("MIG-1", "MIG-1/2/3")):
        text = f"memory: {{devices: [host, {listed}]}}\n" + one(f"backend: fake, device: {device}")
        assert load(text).models["m"].device == device
    for device, listed in (("GPU-ab", "GPU-b"), ("GPU-ab", "MIG-ab"), ("host", "GPU-ab"), ("GPU-ab", "host")):
        text = f"memory: {{devices: [{listed}]}}\n" + one(f"backend: fake, device: {device}")
        assert f"memory.devices leaves '{device}' out" in problems(text)[0]


# --- the top-level memory block ---------------------------------------------------------------------------------------


def test_the_memory_block_says_how_memory_is_kept(load):
    text = "memory: {margin: 0, max_sample_age: 2.5, host_limit: 8GiB, devices: [host, GPU-a-b, MIG-1/2/3]}\n"
    config = load(text + one("backend: fake"))
    assert (config.memory.margin, config.memory.max_sample_age, config.memory.host_limit) == (0, 2.5, 8 << 30)
    assert config.memory.devices == ("host", "GPU-a-b", "MIG-1/2/3")
    assert config.origin("memory").endswith("line 1")
    plain = load(one("backend: fake"))
    assert (plain.memory.margin, plain.memory.devices, plain.origin("memory")) == (None, None, "default")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("7", ": wanted a mapping of the memory's settings, not 7"),
        ("{margin: 5%}", ".margin: wanted a size in bytes"),
        ("{max_sample_age: 0}", ".max_sample_age: wanted a number of seconds above 0"),
        ("{host_limit: 1}", ".host_limit: wanted a size in bytes"),
        ("{devices: []}", ".devices: wanted a list of devices, from 1 to 4096 items, not 0"),
        ("{devices: [gpu0]}", ".devices: item 1: wanted host, or the UUID"),
        ("{devices: [host, host]}", ".devices: item 2: 'host' is in the list before"),
        ("{device: host}", ".device: unknown setting; did you mean devices?"),
    ],
)
def test_a_wrong_memory_block_is_named_with_its_key(problems, memory, message):
    (line,) = problems(f"memory: {memory}\n" + one("backend: fake"))
    assert line.startswith(f"slimproc.yaml:1: memory{message}")
