"""What an engine's environment has that the front's has not, and the other way round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slimproc.replicas.environment import engine_environment

linux = pytest.mark.skipif(sys.platform != "linux", reason="the library is preloaded on Linux only; macOS has its own")


@pytest.fixture
def library(tmp_path) -> Path:
    path = tmp_path / "libopenblas.so.0"
    path.touch()
    return path


def test_an_engine_hears_nothing_of_the_service_manager():
    theirs = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "LISTEN_FDS": "1", "LISTEN_PID": "7", "HOME": "/root"}
    environment = engine_environment(theirs, "llama_cpp")
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID"} & environment.keys()
    assert environment["HOME"] == "/root"


def test_an_engine_finds_this_package_first_wherever_it_is_imported_from():
    package, rest = engine_environment({"PYTHONPATH": "/theirs"}, "fake")["PYTHONPATH"].split(":")
    assert (Path(package) / "slimproc" / "engines").is_dir()
    assert rest == "/theirs"


@linux
def test_only_mlx_engines_get_the_faster_blas(library):
    assert engine_environment({}, "mlx", openblas=library)["LD_PRELOAD"] == str(library)
    for backend in ("llama_cpp", "fake"):
        assert "LD_PRELOAD" not in engine_environment({}, backend, openblas=library)


@linux
def test_what_is_preloaded_already_stays(library):
    preloaded = engine_environment({"LD_PRELOAD": "/theirs.so"}, "mlx", openblas=library)["LD_PRELOAD"]
    assert preloaded == f"/theirs.so:{library}"


def test_where_the_library_is_not_installed_nothing_is_preloaded(tmp_path):
    assert "LD_PRELOAD" not in engine_environment({}, "mlx", openblas=tmp_path / "none")


@pytest.mark.parametrize(
    ("device", "seen"), [(None, "3"), ("host", ""), ("GPU-8f2c", "GPU-8f2c"), ("MIG-1", "MIG-1")], ids=str
)
def test_an_engine_sees_the_device_that_it_is_on_and_no_other(device, seen):
    assert engine_environment({"CUDA_VISIBLE_DEVICES": "3"}, "llama_cpp", device)["CUDA_VISIBLE_DEVICES"] == seen


def test_without_a_device_nothing_is_said_of_devices():
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment({}, "llama_cpp")
