"""Whatever stands in the file, the environment or .env: a configuration, or a ConfigError of printable lines."""

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimproc.config import Config, load_config
from slimproc.config.blocks import BLOCKS, FAKE_KINDS, POLICY_KINDS
from slimproc.config.environment import VARIABLES
from slimproc.config.model import MODEL_KINDS
from slimproc.config.whole import KINDS
from slimproc.errors import ConfigError

QUICK = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["fake", "llama_cpp", "*", "1GiB", "30s", ":80", "[::1]:0", "wait", "pipe", "m", 1, 4, 0.5,
                     "http://h:1", "http://localhost:8000/", "/v1/x", "/%2e%2e/", "none", "host", "GPU-1", "${PORT}"]),
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=4)  # fmt: skip
keys = st.dictionaries(st.sampled_from([*MODEL_KINDS, *BLOCKS, "x"]), values, max_size=4)
fake = st.dictionaries(st.sampled_from([*FAKE_KINDS, "x"]), values, max_size=3)
block = st.dictionaries(
    st.sampled_from([key for block in BLOCKS.values() for key in (*block.kinds, *block.blocks)]), values, max_size=4
)
server = st.sampled_from(
    [{"remote": {"base_url": "http://h:1"}}, {"remote": {"base_url": "http://h:1", "contract": "none"}}, {"command": {"argv": ["x", "${PORT}"]}}]
)  # fmt: skip
model = st.builds(
    lambda keys, blocks, server: {**server, "inference_path": "/x", "max_body": 1, **keys, **blocks},
    st.dictionaries(st.sampled_from([*MODEL_KINDS, "x"]), values, max_size=4),
    st.dictionaries(st.sampled_from([*BLOCKS]), block | values, max_size=2),
    server,
)
models = st.dictionaries(
    st.sampled_from(["m", "n", "a b", "*", "", "\u2028", "\ud800"]),
    st.builds(lambda keys, block: {"backend": "fake", **keys, "fake": block}, keys, fake) | model | values,
    max_size=3,
)
whole = st.builds(
    lambda top, memory, named: {**top, **memory, "models": named},
    st.dictionaries(st.sampled_from([*KINDS, "x"]), values, max_size=4),
    st.dictionaries(st.just("memory"), st.dictionaries(st.sampled_from([*POLICY_KINDS]), values, max_size=3) | values),
    models | values,
)


def judge(file: Path | None, **given: object) -> None:
    try:
        config = load_config(file, flags={}, **{"environ": {}, "dotenv": None, "unmeasured": True, **given})
    except ConfigError as error:
        lines = str(error).splitlines()
        assert lines
        assert all(line.isprintable() and len(line) < 1000 for line in lines)
    else:
        assert isinstance(config, Config)
        assert config.models


@QUICK
@given(data=whole)
def test_any_settings(tmp_path, data):
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(data), "utf-8")  # YAML reads JSON
    judge(file)


@QUICK
@given(text=st.text(alphabet="ab:-?!&*<>|{}[],#'\"%@ \n\tmodels01.~\\\u2028é", max_size=60) | st.binary(max_size=40))
def test_any_bytes(tmp_path, text):
    file = tmp_path / "x.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    judge(file)


@QUICK
@given(
    environ=st.dictionaries(
        st.sampled_from([*VARIABLES, "SLIMPROC_X", "HOME", "XDG_RUNTIME_DIR"]), st.text(max_size=12)
    ),
    lines=st.lists(st.tuples(st.sampled_from([*VARIABLES, "OTHER", "", "#"]), st.text(max_size=12)), max_size=4),
)
def test_any_variables(tmp_path, environ, lines):
    file = tmp_path / "x.yaml"
    file.write_text("models: {m: {backend: fake}, n: {backend: fake}}")
    dotenv = tmp_path / ".env"
    dotenv.write_bytes("\n".join(f"{name}={value}" for name, value in lines).encode("utf-8", "surrogatepass"))
    judge(file, environ=environ, dotenv=dotenv)
