"""Prefix affinity across replicas, seen in which engine makes the tokens."""

from __future__ import annotations

from tests import models
from tests.serving import fake, script


def test_prompts_that_begin_alike_go_to_the_same_replica_and_others_are_spread(serve):
    server = serve(fake(replicas=2, slots=4, context=100_000))
    prefixes = [f"system prompt {number} " + "x" * 2000 for number in range(6)]

    used = []
    for _ in range(3):
        for prefix in prefixes:
            before = [replica["tokens"] for replica in server.replicas()]
            assert server.complete(f"{prefix}\n{script(tokens=['a'])}").status == 200
            after = [replica["tokens"] for replica in server.replicas()]
            used.append([now - then for now, then in zip(after, before, strict=True)].index(1))

    assert used[:6] == used[6:12] == used[12:]
    assert sorted(used[:6]) == [0, 0, 0, 1, 1, 1]


def test_without_a_common_beginning_idle_replicas_share_the_work(serve):
    server = serve(fake(replicas=2, slots=4))

    with (
        server.stream(script(token_latency=0.01), max_tokens=1000) as first,
        server.stream(script(token_latency=0.01), max_tokens=1000) as second,
    ):
        first.take(2)
        second.take(2)
        assert [replica["sequences"] for replica in server.replicas()] == [1, 1]


def test_two_replicas_of_a_real_model_read_only_what_is_new_of_a_beginning_that_one_of_them_knows(serve, tmp_path):
    """Were a prompt's replica left to chance, the other one would know nothing of it."""
    models.skip_without_llama_cpp()
    path = models.tiny_random(tmp_path / "tiny.gguf")
    server = serve({"models": {"tiny": {"backend": "llama_cpp", "path": str(path), "replicas": 2, "threads": 1}}})
    prefixes = [f"system prompt {number} " + "x" * 600 for number in range(3)]  # odd, so that taking turns would fail

    def cached(question: str) -> list[int]:
        usages = [server.complete(prefix + question, max_tokens=2).json["usage"] for prefix in prefixes]
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]

    cached(" first")
    assert min(replica["tokens"] for replica in server.replicas()) > 0, "both have work"
    for question in (" second", " third"):
        assert all(count >= len(prefix) for count, prefix in zip(cached(question), prefixes, strict=True))
