"""Loading: settings that make no sense, files that llama.cpp refuses, and those on which it takes the process along."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.errors import LoadFailed
from slimproc.threads import default_threads, usable_cores
from tests.engines.llama_cpp.kinds import with_positions
from tests.models import CHATML

ROOT = str(Path(__file__).parents[3])

CHILD = textwrap.dedent("""
    import sys
    from tests.engines.driver import Engine
    from slimproc.engines.backend import create
    from slimproc.errors import LoadFailed
    from slimproc.settings import EngineSettings
    try:
        engine = Engine(create(EngineSettings(model="m", backend="llama_cpp", path=sys.argv[1], slots=1, context=64)))
    except LoadFailed as error:
        print("refused", error.permanent, error.message)
    else:
        print("loaded", flush=True)
        print("generated", engine.complete("hello", 40).failure)
""")


def in_child(path):
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        capture_output=True, text=True, timeout=60, check=False, env={"GGML_NO_BACKTRACE": "1", "PYTHONPATH": ROOT},
    )  # fmt: skip


def refusal(settings) -> LoadFailed:
    with pytest.raises(LoadFailed) as failure:
        create(settings).load(lambda _fraction: None)
    return failure.value


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0}, {"slots": -1}, {"slots": 257}, {"context": 0}, {"context": 7}, {"context": 2**30},
        {"context": -5}, {"threads": 0}, {"threads": 100_000}, {"gpu_layers": -1},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_native_code_would_abort_on_are_refused_by_name(settings, changes):
    failure = refusal(settings(**changes))
    assert failure.permanent
    assert next(iter(changes)) in failure.message


def test_a_cache_larger_than_the_machine_is_refused_before_it_is_touched(settings):
    failure = refusal(settings(slots=256, context=2**22))
    assert failure.permanent
    assert "KV cache" in failure.message


def test_no_path_and_an_absent_file_are_refused(settings, tmp_path):
    assert "absent.gguf" in refusal(settings(tmp_path / "absent.gguf")).message


def test_a_model_that_is_no_text_generator_is_refused(settings, models, tmp_path):
    path = tmp_path / "model.gguf"
    good = (models / "tiny.gguf").read_bytes()
    key = b"llama.attention.causal"
    extra = len(key).to_bytes(8, "little") + key + (7).to_bytes(4, "little") + b"\0"
    keys = int.from_bytes(good[16:24], "little") + 1
    # The data behind a header begin at a multiple of 32: the longer header moves them by a whole number of those.
    padding = b"x" * (-len(extra) % 32)
    name = b"general.name"
    at = good.index(name) + len(name) + 4
    length = int.from_bytes(good[at : at + 8], "little")
    renamed = (length + len(padding)).to_bytes(8, "little") + padding + good[at + 8 :]
    path.write_bytes(good[:16] + keys.to_bytes(8, "little") + extra + good[24:at] + renamed)
    assert "does not generate text" in refusal(settings(path)).message


def test_a_whole_life_of_the_process_ends_without_a_crash_though_nobody_closed_the_model(models):
    child = in_child(models / "tiny.gguf")
    assert (child.returncode, child.stdout, child.stderr) == (0, "loaded\ngenerated None\n", "")


def test_the_model_says_what_it_is(open_engine):
    info = open_engine(context=100, slots=3).info
    assert (info.context, info.slots, info.vocab_size) == (100, 3, 260)
    assert info.chat_template == CHATML
    assert (info.bos_token, info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert info.control_tokens == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert info.details["threads"] == 1
    assert info.details["trained_context"] == 2048
    assert info.details["kv_bytes"] == 3 * 100 * 2 * 2 * (16 + 16) * 2


def test_the_context_is_the_trained_one_unless_said_otherwise(open_engine, capfd):
    assert open_engine(context=None, slots=1).info.context == 2048
    assert "trained" not in capfd.readouterr().err
    assert open_engine(context=3000, slots=1).info.context == 3000
    assert "context 3000 is more than the 2048 tokens this model was trained for" in capfd.readouterr().err


def test_loading_says_nothing_when_all_is_well(open_engine, capfd):
    open_engine(slots=3, context=100).complete("hello", 3)
    assert capfd.readouterr() == ("", "")


def test_an_exception_in_progress_ends_the_load_and_comes_out(settings):
    def gone(_fraction):
        raise ConnectionError("the front is gone")

    with pytest.raises(ConnectionError, match="the front is gone"):
        create(settings()).load(gone)


def test_closing_what_was_never_loaded_is_no_error(settings):
    create(settings()).close()


# --- threads ----------------------------------------------------------------------------------------------------


def test_one_core_is_left_to_the_front():
    assert [default_threads(cores) for cores in (1, 2, 3, 8)] == [1, 1, 2, 7]


@pytest.fixture
def four_cpus(tmp_path, monkeypatch):
    """The root of a machine with four CPUs on two cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    return tmp_path


def put(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_hyper_threads_count_once(four_cpus, tmp_path):
    assert usable_cores(four_cpus) == 2
    assert usable_cores(tmp_path / "nothing") == 4


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a.slice/b.service", "sys/fs/cgroup/a.slice/b.service/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a.slice/b.service", "sys/fs/cgroup/a.slice/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/../host/path", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "rubbish"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 0"}, 2),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/slim",
                "sys/fs/cgroup/cpu/slim/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/slim/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/slim",
                "sys/fs/cgroup/cpu/slim/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/slim/cpu.cfs_period_us": "100000",
            },
            1,
        ),
    ],
)
def test_the_quota_of_every_group_around_us_counts(four_cpus, files, cores):
    put(four_cpus, files)
    assert usable_cores(four_cpus) == cores


def test_a_table_of_positions_bounds_the_context_and_its_last_position_is_reached(tmp_path):
    """In a process of its own, which an assertion of llama.cpp ended behind the last position."""
    child = in_child(with_positions(tmp_path / "gpt2.gguf"))
    assert (child.returncode, child.stdout) == (0, "loaded\ngenerated None\n"), child.stderr
    assert "trained for, so it is 16" in child.stderr
