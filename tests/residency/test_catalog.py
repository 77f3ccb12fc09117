"""What models claim and where they may be, as the configuration, the measurements and the devices that there are say."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimproc.config import load_config
from slimproc.errors import ConfigError
from slimproc.residency.catalog import Catalog
from slimproc.residency.probes.lines import ABSENT
from slimproc.residency.profiles import ProfileStore
from slimproc.residency.views import HOST, Claim, DeviceSample, Sample

GPU = "GPU-00000000-1111-2222-3333-444444444444"
OTHER = "GPU-00000001-1111-2222-3333-444444444444"
STAND_IN = {"SLIMPROC_FAKE_NVML": "/nowhere"}


@pytest.fixture
def make(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(996))

    def catalog(model, environ=()):
        file = tmp_path / "slimproc.yaml"
        file.write_text(f"state_dir: {tmp_path}\nmodels: {{m: {model}}}\n")
        config = load_config(file, flags={}, environ={}, dotenv=None)
        return Catalog(config, dict(environ), ProfileStore(tmp_path)), SimpleNamespace(config=config.models["m"])

    return catalog


def sample(*gpus, taken=1.0):
    found = {HOST: DeviceSample("host", "host", 1000, 1000)}
    found |= {gpu: DeviceSample("gpu", gpu, 1000, 1000, index=place) for place, gpu in enumerate(gpus)}
    return Sample(taken, found)


def local(tmp_path: Path, more=""):
    return f"{{backend: llama_cpp, path: {tmp_path}/m.gguf, gpu_layers: 0{more}}}"


def test_the_file_of_the_configuration_goes_before_what_was_measured_and_that_before_a_guess(make, tmp_path):
    catalog, unit = make(local(tmp_path))
    assert catalog.claim(unit.config).source == "estimated"

    catalog.keep(unit, Claim(30, 20))
    measured = catalog.claim(unit.config)
    assert (measured.source, measured.load_peak, measured.run_peak, measured.file_bytes) == ("measured", 30, 20, 1000)

    catalog, unit = make(local(tmp_path, ", memory: {load_peak: 9MiB, inference_peak: 8MiB}"))
    given = catalog.claim(unit.config)
    assert (given.source, given.peak, given.file_bytes) == ("configured", 9 << 20, 1000)


def test_a_model_that_can_use_a_gpu_goes_there_and_without_any_in_the_machine_to_the_host(make):
    catalog, unit = make("{backend: fake, fake: {bytes: 100}}", STAND_IN)
    catalog.look(sample(), None)
    assert catalog.place(unit) == ()  # nobody knows yet

    catalog.look(sample(), ABSENT)
    assert catalog.place(unit) == (HOST,)
    catalog.look(sample(GPU), "")
    assert catalog.place(unit) == (GPU,)


def test_a_driver_that_does_not_answer_makes_no_model_slow_on_the_host(make):
    catalog, unit = make("{backend: fake, fake: {bytes: 100}}", STAND_IN)
    catalog.look(sample(), "driver_mismatch")

    assert catalog.place(unit) == ()


def test_a_device_that_is_not_there_is_an_error_at_the_start_and_later_one_warning(make, caplog):
    named = f"{{backend: fake, device: {GPU}, fake: {{bytes: 100}}}}"
    catalog, _ = make(named, STAND_IN)
    with pytest.raises(ConfigError, match=r"models\.m\.device"):
        catalog.look(sample(), ABSENT)

    catalog, unit = make(named, STAND_IN)
    catalog.look(sample(GPU), "")
    for taken in (2.0, 3.0, 4.0):
        catalog.look(sample(taken=taken), "")

    assert caplog.text.count("the devices have changed") == 1
    assert catalog.place(unit) == (GPU,)


REMOTE = (
    """{remote: {base_url: "http://127.0.0.1:9", contract: %s}, inference_path: /v1/completions, max_body: 1MiB%s}"""
)
MEMORY = ", memory: {load_peak: 100, inference_peak: 100}"


@pytest.mark.parametrize("when", ["start", "reload"])
def test_on_which_of_several_gpus_a_server_of_others_has_its_model_must_be_said(make, when):
    catalog, unit = make(REMOTE % ("control", MEMORY))
    wanted = rf"models\.m\.device.*{GPU}, {OTHER} or host"
    if when == "start":
        with pytest.raises(ConfigError, match=wanted) as caught:
            catalog.look(sample(GPU, OTHER), "")
    else:
        before, _ = make("{backend: fake}")
        before.look(sample(GPU, OTHER), "")
        with pytest.raises(ConfigError, match=wanted) as caught:
            before.check(unit.config)
    assert caught.value.param == "models.m.device"


@pytest.mark.parametrize(
    "model",
    [
        REMOTE % ("control", f"{MEMORY}, device: host"),
        REMOTE % ("control", f"{MEMORY}, device: {GPU}"),
        REMOTE % ("none", ""),
        f"{{command: {{argv: [a, '${{PORT}}']}}, inference_path: /v1/completions, max_body: 1MiB{MEMORY}}}",
        "{backend: fake, fake: {bytes: 100}}",
    ],
)
def test_of_everybody_else_it_is_known_or_decided_here(make, model):
    catalog, unit = make(model, STAND_IN)
    catalog.look(sample(GPU, OTHER), "")
    catalog.check(unit.config)
    assert catalog.place(unit)


def test_a_server_of_others_on_the_only_gpu_needs_no_word(make):
    catalog, unit = make(REMOTE % ("control", MEMORY))
    catalog.look(sample(GPU), "")
    assert catalog.place(unit) == (GPU,)


# --- what is in the way -------------------------------------------------------------------------------------------


def faulty(seen, *devices, fault="lost"):
    changed = {device: replace(seen.devices[device], fault=fault) for device in devices}
    return replace(seen, devices={**seen.devices, **changed})


def test_a_model_is_kept_off_everywhere_only_when_all_its_devices_are_of_no_use(make):
    catalog, unit = make("{backend: fake, fake: {bytes: 100}}", STAND_IN)
    seen = sample(GPU, OTHER)
    catalog.look(seen, "")
    assert catalog.obstacle(unit.config, seen) == ""
    assert catalog.obstacle(unit.config, faulty(seen, GPU)) == ""
    assert "lost" in catalog.obstacle(unit.config, faulty(seen, GPU, OTHER))
    assert "reboot" in catalog.obstacle(unit.config, faulty(seen, GPU, OTHER, fault="driver_mismatch"))


def test_a_gpu_that_only_the_configuration_knows_is_there_with_the_drivers_fault_until_the_driver_answers(make):
    catalog, unit = make(f"{{backend: fake, fake: {{bytes: 100}}}}}}\nmemory: {{devices: [{GPU}]", STAND_IN)
    catalog.look(sample(), "driver_mismatch")
    seen = catalog.with_unseen(sample())
    assert (seen.devices[GPU].fault, seen.devices[GPU].free) == ("driver_mismatch", 0)
    assert "reboot" in catalog.obstacle(unit.config, seen)

    catalog.look(sample(GPU), "")
    assert catalog.with_unseen(sample(GPU)) == sample(GPU)
    assert catalog.obstacle(unit.config, sample(GPU)) == ""
