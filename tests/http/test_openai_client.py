"""What the official OpenAI client makes of our errors: its own class for each, with our words in it."""

from __future__ import annotations

import openai
import pytest
from aiohttp import web

from slimproc import errors

RAISED = {
    "invalid": (errors.InvalidRequest("n: no", param="n"), openai.BadRequestError),
    "context": (errors.ContextLengthExceeded("too long", param="messages"), openai.BadRequestError),
    "model": (errors.ModelNotFound("no such model", param="model"), openai.NotFoundError),
    "method": (errors.MethodNotAllowed("no"), openai.APIStatusError),
    "slow": (errors.BodyTimeout("slow"), openai.APIStatusError),
    "big": (errors.BodyTooLarge("big"), openai.APIStatusError),
    "media": (errors.UnsupportedMediaType("gzip"), openai.APIStatusError),
    "full": (errors.Overloaded("full", retry_after=2), openai.InternalServerError),
    "late": (errors.DeadlineExceeded("late"), openai.InternalServerError),
    "crash": (errors.EngineCrashed("dead"), openai.InternalServerError),
}


@pytest.mark.parametrize("name", RAISED)
def test_the_client_raises_its_matching_class_with_our_code_and_param(loopback, name):
    error, wanted = RAISED[name]

    async def fail(_: web.Request) -> web.Response:
        raise error

    async def scenario(server):
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(wanted) as caught:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            return caught.value

    seen = loopback(lambda app: app.router.add_post("/v1/chat/completions", fail), scenario, body_limit=1000)
    assert (seen.status_code, seen.code, seen.param, seen.type) == (error.status, error.code, error.param, error.type)
    assert error.message in str(seen)
    assert seen.request_id


def test_a_path_that_is_not_there_is_the_clients_not_found(loopback):
    async def scenario(server):
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.list()
            return caught.value

    assert loopback(lambda _: None, scenario).code == "not_found"


@pytest.mark.parametrize(("name", "tries"), [("late", 1), ("full", 2)])
def test_the_client_tries_again_only_where_it_may_help(loopback, name, tries):
    seen = []
    error = errors.DeadlineExceeded("late") if name == "late" else errors.Overloaded("full", retry_after=0)

    async def fail(_: web.Request) -> web.Response:
        seen.append(name)
        raise error

    async def scenario(server):
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=1
        ) as client:
            with pytest.raises(openai.InternalServerError):
                await client.models.list()

    loopback(lambda app: app.router.add_get("/v1/models", fail), scenario)
    assert len(seen) == tries
