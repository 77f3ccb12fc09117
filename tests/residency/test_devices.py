"""Which devices may be used, as the configuration and the environment say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slimproc
from slimproc.errors import ConfigError
from slimproc.residency.devices import (
    gpu_offload_possible,
    has_gpu_library,
    resolve_device,
    usable_devices,
    visible_gpus,
)
from slimproc.residency.views import HOST, DeviceSample, Sample
from slimproc.settings import BACKENDS
from tests.models import skip_without_llama_cpp

A, B, C = "GPU-aaaa1111-2222", "GPU-aabb1111-2222", "GPU-cccc1111-2222"
M0, M1 = "MIG-00001111-2222", "MIG-00011111-2222"


def machine(*gpus, by_number=None):
    """``gpus`` in the order in which the driver lists them."""
    numbers = by_number or {gpu: number for number, gpu in enumerate(gpus)}
    devices = {HOST: DeviceSample("host", "host memory", 100, 50)}
    devices |= {gpu: DeviceSample("gpu", "a GPU", 100, 50, index=numbers[gpu]) for gpu in gpus}
    return Sample(1.0, devices)


def visible(value, sample=None, **environ):
    environ |= {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return visible_gpus(sample or machine(A, B, C), environ)[0]


# --- CUDA_VISIBLE_DEVICES -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("void", []),
        ("0", [A]),
        ("1,0", [B, A]),
        (" 2 , 0 ", [C, A]),
        ("0,0", []),
        ("0,1,0", []),
        ("1,-1,0", [B]),
        ("0,7,1", [A]),
        ("0,,1", [A]),
        ("0,x,1", [A]),
        ("99999999999999999999999", []),
        ("²", []),
        (C, [C]),
        (f"{C},{A}", [C, A]),
        ("GPU-cc", [C]),
        ("GPU-c,GPU-aaa", [C, A]),
        ("GPU-a", []),  # two begin so
        ("GPU-", []),
        ("GPU-dddd", []),
        (f"{A},GPU-dddd,{B}", [A]),
        (f"{A},GPU-aaaa", []),
        ("MIG-0000", []),
        ("gpu-cc", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value, gpus):
    assert visible(value) == gpus


def test_numbers_go_by_the_bus_and_not_by_the_order_of_the_list():
    swapped = machine(A, B, by_number={A: 1, B: 0})
    assert visible(None, swapped) == [B, A]
    assert visible("0", swapped) == [B]


def test_a_gpu_that_is_missing_keeps_its_number():
    assert visible("2", machine(A, C, by_number={A: 0, C: 2})) == [C]
    assert visible("1", machine(A, C, by_number={A: 0, C: 2})) == []


@pytest.mark.parametrize(
    ("value", "gpus"), [(M1, [M1]), (f"{M1},{M0}", [M1, M0]), ("MIG-0001", [M1]), ("0", [M0]), ("1", [B]), ("0,0", [])]
)
def test_mig_instances_are_devices_and_a_number_means_the_first_of_its_gpu(value, gpus):
    assert visible(value, machine(M0, M1, B, by_number={M0: 0, M1: 0, B: 1})) == gpus


@pytest.mark.parametrize(
    ("value", "told"),
    [("0,0", "repeats"), ("0,9", "'9'"), ("GPU-x", "'GPU-x'"), ("1,0", "order of the PCI bus"), ("0,-1,1", "'-1'")],
)
def test_what_may_not_have_been_meant_is_told(value, told):
    _, warnings = visible_gpus(machine(A, B, C), {"CUDA_VISIBLE_DEVICES": value})
    assert len(warnings) == 1
    assert told in warnings[0]
    assert f"CUDA_VISIBLE_DEVICES={value}" in warnings[0]


@pytest.mark.parametrize("value", [None, "", "-1", "NoDevFiles", C, "GPU-cc,GPU-aaa"])
def test_what_is_clear_is_not_talked_of(value):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(machine(A, B, C), environ)[1] == []


def test_numbers_are_clear_when_cuda_counts_as_we_do_or_there_is_nothing_to_mix_up():
    assert visible_gpus(machine(A, B), {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[1] == []
    assert visible_gpus(machine(A), {"CUDA_VISIBLE_DEVICES": "0"})[1] == []


# --- memory.devices -------------------------------------------------------------------------------------------


def test_by_default_every_gpu_and_then_the_host_may_be_used():
    assert usable_devices(machine(A, B), None, {}).devices == (A, B, HOST)
    assert usable_devices(machine(A, B), None, {"CUDA_VISIBLE_DEVICES": "1"}).devices == (B, HOST)
    assert usable_devices(machine(), None, {}).devices == (HOST,)


def test_the_configured_devices_are_used_in_their_order():
    assert usable_devices(machine(A, B, C), [C, HOST, "GPU-aaa", C], {}).devices == (C, HOST, A)
    assert usable_devices(machine(A, B), [B], {}).devices == (B,)


@pytest.mark.parametrize("name", ["GPU-dddd", "GPU-a", "0", "cuda:0", "Host", "", "MIG-0001"])
def test_an_unknown_device_is_an_error_that_lists_what_there_is(name):
    with pytest.raises(ConfigError) as caught:
        usable_devices(machine(A, B), [HOST, name], {})
    assert f"memory.devices: there is no device {name!r}" in caught.value.message
    assert f"{A}, {B}, host" in caught.value.message


def test_a_device_that_the_environment_hides_is_an_error_that_says_so():
    with pytest.raises(ConfigError) as caught:
        usable_devices(machine(A, B), [B], {"CUDA_VISIBLE_DEVICES": "0"})
    assert f"CUDA_VISIBLE_DEVICES=0 hides {B}" in caught.value.message
    assert A in caught.value.message


@pytest.mark.parametrize("driver", ["driver_mismatch", "unknown: stand-in error 999", None])
def test_while_the_driver_says_nothing_a_configured_gpu_is_not_called_unknown(driver):
    usable = usable_devices(machine(), [A, HOST], {}, driver=driver)
    assert usable.devices == (A, HOST)
    assert A in usable.warnings[0]
    with pytest.raises(ConfigError):
        usable_devices(machine(), ["cuda:0"], {}, driver=driver)
    with pytest.raises(ConfigError):
        usable_devices(machine(), [A], {}, driver="absent")


def test_a_models_device_is_one_of_those_that_may_be_used():
    assert resolve_device(HOST, (A, HOST)) == HOST
    assert resolve_device(A, (A, B)) == A
    assert resolve_device("GPU-aab", (A, B)) == B
    for name in (C, "GPU-a", "0", ""):
        with pytest.raises(ConfigError) as caught:
            resolve_device(name, (A, B), param="models.m.device")
        assert caught.value.message.startswith("models.m.device: ")
        assert f"{A}, {B}" in caught.value.message


# --- what an engine sees --------------------------------------------------------------------------------------


# --- llama.cpp ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "possible"),
    [
        (["libggml.so", "libggml-base.so.0", "libggml-cpu.so", "libllama.so"], False),
        (["libggml-cpu-cuda.so"], False),
        (["libggml-blas.dylib", "libggml-metal.dylib"], True),
        (["libggml-cuda.so"], True),
        (["libggml-cuda.so.0.25.3"], True),
        (["libggml-hip.so"], True),
        (["ggml-vulkan.dll"], True),
        (["libggml-vulkan-shaders.so"], True),
        ([], False),
    ],
)
def test_a_build_for_gpus_is_known_by_its_libraries(tmp_path, files, possible):
    for name in files:
        (tmp_path / name).touch()
    assert has_gpu_library([tmp_path / "missing", tmp_path]) is possible


def test_the_installed_llama_cpp_is_looked_at_without_being_loaded(tmp_path):
    skip_without_llama_cpp()
    code = """
import sys
from slimproc.residency.devices import gpu_offload_possible
from slimproc.settings import BACKENDS
print(gpu_offload_possible(BACKENDS["llama_cpp"], {}), "llama_cpp" in sys.modules)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(slimproc.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout
    assert said.endswith(" False\n")


def test_libraries_may_be_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "libggml-cuda.so").touch()
    assert gpu_offload_possible(BACKENDS["llama_cpp"], {"LLAMA_CPP_LIB_PATH": str(tmp_path)}) is False, (
        "there is no llama_cpp to load them"
    )
    monkeypatch.undo()
    skip_without_llama_cpp()
    assert gpu_offload_possible(BACKENDS["llama_cpp"], {"LLAMA_CPP_LIB_PATH": str(tmp_path)}) is True
