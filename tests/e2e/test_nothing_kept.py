"""What a server leaves on disk: what its models were seen to need, and nothing else, least of all anybody's words."""

from __future__ import annotations

import pytest

from tests.models import skip_without_llama_cpp, tiny_random
from tests.serving import ServerProcess, script, wait_until

SECRET = "the-words-of-a-caller"
OURS = {"run/slimproc.yaml", "run/log", "model.gguf"}
"""What the test itself has put there."""


def files(directory):
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if not file.is_dir()}


@pytest.fixture
def homes(tmp_path):
    """Everywhere that a program might think of leaving something."""
    found = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "XDG_CACHE_HOME": "cache",
        "XDG_STATE_HOME": "xdg",
        "XDG_CONFIG_HOME": "own",
    }
    for folder in found.values():
        (tmp_path / folder).mkdir()
    return {key: str(tmp_path / folder) for key, folder in found.items()}


@pytest.mark.timeout(180)
def test_after_a_stop_there_are_the_measured_profiles_and_nothing_else(tmp_path, homes):
    skip_without_llama_cpp()
    models = {
        "tiny": {"backend": "llama_cpp", "path": str(tiny_random(tmp_path / "model.gguf")), "slots": 2, "context": 256},
        "fake": {"backend": "fake", "fake": {"token_latency": 0.01}},
    }
    with ServerProcess(tmp_path / "run", {"models": models}, **homes) as server:
        server.wait_ready()
        assert server.chat(SECRET, model="tiny", max_tokens=8).status == 200
        assert server.complete(f"{SECRET} again", model="tiny", max_tokens=8, user=SECRET).status == 200
        left = server.stream(script(tokens=[SECRET] * 1000), model="fake")
        left.take(2)
        left.close()
        server.kill_engine(1)
        wait_until(lambda: server.complete(SECRET, model="fake", max_tokens=2).status == 200, "it is back")
        assert server.complete(SECRET, model="fake", max_tokens=-1).status == 400
        frees = set()
        wait_until(
            lambda: (
                len(frees | {server.metric("memory_bytes", device="host", kind="free")}) > 3
                or frees.add(server.metric("memory_bytes", device="host", kind="free"))
            ),
            "samples have come",
        )
        assert server.stop() == 0

    assert files(tmp_path) - OURS == {"run/state/profiles.json"}
    assert SECRET not in (tmp_path / "run/state/profiles.json").read_text()
    assert SECRET not in server.log
