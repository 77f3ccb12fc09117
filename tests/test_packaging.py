"""What is published: wheel and sdist are whole and name their licences, and the wheel serves where there is nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.serving import LIMIT, wait_until

ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the build and the installation fetch packages


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was made from it. The tree is a copy: what an earlier build left in it
    (``*.egg-info/SOURCES.txt``) would hide what is missing.
    """
    tree, dist = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=leave_out)
    command = [sys.executable, "-m", "build", "--outdir", str(dist), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, cwd=dist, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deprecat" not in (done.stdout + done.stderr).lower()
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def test_the_wheel_has_the_packages_files_and_no_others(built):
    files = zipfile.ZipFile(built[1]).namelist()
    ours = (file for file in (ROOT / "slimproc").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert {name for name in files if ".dist-info/" not in name} == {str(file.relative_to(ROOT)) for file in ours}


def test_both_have_the_licence_and_the_notices(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as opened:
        (folder,) = {name.partition("/")[0] for name in opened.namelist() if ".dist-info/" in name}
        for name in ("LICENSE", "THIRD_PARTY_NOTICES.md"):
            assert opened.read(f"{folder}/licenses/{name}") == (ROOT / name).read_bytes()
        assert "\nLicense-Expression: MIT\n" in opened.read(f"{folder}/METADATA").decode()
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "THIRD_PARTY_NOTICES.md", "README.md", "pyproject.toml"} <= names


def test_the_wheel_in_an_empty_environment_serves_the_fake(built, tmp_path):
    commands, elsewhere, log = tmp_path / "venv" / "bin", tmp_path / "elsewhere", tmp_path / "log"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], env=ENVIRON, check=True)
    pip = [str(commands / "python"), "-m", "pip", "-q"]
    subprocess.run([*pip, "install", str(built[1])], env=ENVIRON, check=True)
    subprocess.run([*pip, "check"], env=ENVIRON, check=True)
    serve = [str(commands / "slimproc"), "serve", "--backend", "fake", "--port", "0"]
    serve += ["--admin-socket", str(tmp_path / "a.sock")]
    environ = ENVIRON | {"XDG_STATE_HOME": str(elsewhere)}
    with log.open("w") as out:
        server = subprocess.Popen(serve, stdout=out, stderr=out, cwd=elsewhere, env=environ)
    try:
        listens = r"url=(http://127\.0\.0\.1:\d+)"
        url = wait_until(lambda: re.search(listens, log.read_text()), "it listens")[1]
        body = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=LIMIT) as answer:
            assert json.load(answer)["choices"][0]["text"] == " tok0 tok1 tok2"
    finally:
        server.terminate()
        ended = server.wait(LIMIT)
    assert ended == 0, log.read_text()
