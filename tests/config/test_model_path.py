"""Where a model's path leads, without any network and without importing anything."""

import sys
from pathlib import Path

import pytest

from slimproc.errors import LoadFailed
from slimproc.model_path import resolve


def fails(spec: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(LoadFailed) as caught:
        resolve(spec, environ or {})
    assert caught.value.permanent
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a_model_package"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "m.gguf").touch()
    (folder / "sub" / "n.gguf").touch()
    (tmp_path / "outside.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cache = tmp_path / "hub"
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc\n")
    (repository / "blobs").mkdir()
    (repository / "blobs" / "b").touch()
    (snapshot / "m.gguf").symlink_to("../../blobs/b")
    return cache


def test_a_file_and_a_directory_are_themselves(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("spec", ["/no/such/file.gguf", "~nobody-of-this-name/x", "x" * 5000, "nul\0nul"])
def test_a_path_that_leads_nowhere_is_one_line_naming_it(spec):
    message = fails(spec)
    assert repr(spec)[1:20] in message
    assert len(message) < 6000


def test_a_message_has_a_path_once_and_whole_however_long_it_is(monkeypatch):
    assert fails("/no/such.gguf") == "cannot find model '/no/such.gguf': there is no file or directory of that name"
    long = "/no/" + "such/" * 60 + "m.gguf"
    assert fails(long).endswith(long)
    monkeypatch.setenv("HOME", "/no")
    assert fails("~/m.gguf").endswith("there is no file or directory /no/m.gguf")


def test_a_packages_file_is_found_without_importing_it(package):
    assert resolve("package:a_model_package/m.gguf") == package / "m.gguf"
    assert resolve("package:a_model_package/sub/n.gguf") == package / "sub" / "n.gguf"
    assert "a_model_package" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("package:a_model_package/none.gguf", "there is no none.gguf in "),
        ("package:a_model_package/../outside.gguf", "wanted package:NAME/FILE"),
        ("package:a_model_package/sub/../../outside.gguf", "wanted package:NAME/FILE"),
        ("package:a_model_package//etc/passwd", "wanted package:NAME/FILE"),
        ("package:a_model_package/", "wanted package:NAME/FILE"),
        ("package:a_model_package", "wanted package:NAME/FILE"),
        ("package:a.b/m.gguf", "wanted package:NAME/FILE"),
        ("package:../m.gguf", "wanted package:NAME/FILE"),
        ("package:no_such_package/m.gguf", "not installed (pip install no-such-package)"),
        ("package:sys/m.gguf", "not installed"),
    ],
)
def test_a_packages_file_that_is_not_there_or_not_in_it_is_refused(package, spec, reason):
    assert reason in fails(spec)


def test_the_hub_cache_is_where_the_variables_say(hub, tmp_path):
    snapshot = hub / "models--org--name" / "snapshots" / "0123abc"
    home = tmp_path / "home"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "hub").symlink_to(hub)
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "hub").symlink_to(hub)
    for environ in (
        {"HF_HUB_CACHE": str(hub), "HF_HOME": "/nowhere"},
        {"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": "/nowhere"},
        {"XDG_CACHE_HOME": str(tmp_path)},
        {"HOME": str(home)},
        {"HF_HOME": "~/.cache/huggingface", "HOME": str(home)},
    ):
        assert resolve("hf:org/name/m.gguf", environ).samefile(snapshot / "m.gguf")
        assert resolve("hf:org/name", environ).samefile(snapshot)


def test_a_snapshots_file_keeps_its_own_name(hub):
    """The blobs have hashes for names; a loader that looks for sibling shards needs the link's."""
    assert resolve("hf:org/name/m.gguf", {"HF_HUB_CACHE": str(hub)}).name == "m.gguf"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("hf:org/name/none.gguf", "download it first: hf download org/name none.gguf"),
        ("hf:org/other", "download it first: hf download org/other"),
        ("hf:org", "wanted hf:ORG/NAME"),
        ("hf:org/", "wanted hf:ORG/NAME"),
        ("hf:org/name/", "wanted hf:ORG/NAME"),
        ("hf:../name", "wanted hf:ORG/NAME"),
        ("hf:org/name/../../x", "wanted hf:ORG/NAME"),
        ("hf:org/name//etc/passwd", "wanted hf:ORG/NAME"),
        ("hf:", "wanted hf:ORG/NAME"),
    ],
)
def test_what_the_hub_cache_does_not_have_is_told_and_never_fetched(hub, spec, reason):
    assert reason in fails(spec, {"HF_HUB_CACHE": str(hub)})


@pytest.mark.parametrize("commit", ["", "..", "../../../etc", "a/b"])
def test_a_ref_that_names_no_commit_is_refused(hub, commit):
    (hub / "models--org--name" / "refs" / "main").write_text(commit)
    assert "does not hold a commit" in fails("hf:org/name", {"HF_HUB_CACHE": str(hub)})


def test_a_download_that_was_not_finished_is_told(hub):
    (hub / "models--org--name" / "blobs" / "b").unlink()
    assert "is not there" in fails("hf:org/name/m.gguf", {"HF_HUB_CACHE": str(hub)})
