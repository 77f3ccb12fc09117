"""Posts: requests of one body to the inference path of a server that is no engine of ours, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from slimproc.cli.measuring.asked import Asked
from slimproc.cli.measuring.failures import BadAsk, CannotMeasure
from slimproc.cli.measuring.subject import Subject
from slimproc.errors import BackendFailed
from slimproc.upstream.proxy import Forwarder, UpstreamAnswer
from slimproc.upstream.slot import UpstreamSlot

_TEXT: Final = "Count the ships in the harbour, and say who asked."
_SMALL: Final[dict[str, dict[str, Any]]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": 64},
    "/completions": {"prompt": _TEXT, "max_tokens": 64},
    "/embeddings": {"input": _TEXT},
}
"""By the end of the inference path. The model's name is left out, which servers with one model do not need."""
_PIECE: Final = 1 << 16
_SAID: Final = 300
"""Bytes of an error's body that are passed on."""


class Posts:
    """``small``: the body is one of ours, which is smaller than what callers will send."""

    def __init__(self, subject: Subject, asked: Asked) -> None:
        """Raises BadAsk where a body is needed and not given, or is too large for the model."""
        model = subject.model
        self._subject = subject
        self._forwarder = Forwarder()
        self.concurrency = model.concurrency if asked.concurrency is None else asked.concurrency
        self.small = asked.body is None
        self._body = _small_body(model.inference_path) if asked.body is None else asked.body
        if model.max_body is not None and len(self._body) > model.max_body:
            raise BadAsk(f"--body has {len(self._body)} bytes, and the model's max_body is {model.max_body}")
        length = ("Content-Length", str(len(self._body)))
        self._headers = [("Content-Type", asked.content_type), length, ("Accept", "*/*")]

    async def run(self, turn: int) -> None:
        """All requests, once, until every answer has come to its end. Raises CannotMeasure."""
        del turn  # all are the same
        self._subject.check()
        life = self._subject.replica.life
        assert life is not None
        tasks: list[asyncio.Task[None]] = []
        try:
            for _ in range(self.concurrency):
                if not life.free_slots:
                    raise CannotMeasure(f"{self._subject.model.name}: its server takes no request now")
                slot = life.take_slot()
                assert isinstance(slot, UpstreamSlot), "an upstream has such slots"
                tasks.append(asyncio.create_task(self._post(slot)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, slot: UpstreamSlot) -> None:
        answer: UpstreamAnswer | None = None
        url = slot.base_url + self._subject.model.inference_path
        try:
            answer = await self._until_lost(slot, self._forwarder.send(url, self._headers, self._pieces()))
            said = b""
            while piece := await self._until_lost(slot, answer.read()):
                said = (said + piece)[:_SAID]
        except BackendFailed as error:
            raise CannotMeasure(f"{url}: {error}") from None
        finally:
            if answer is not None:
                answer.close()
            slot.release()
        if answer.status >= 400:
            text = said.decode("utf-8", "replace")
            raise CannotMeasure(f"{url} answers {answer.status} to a request: {text}{self._advice}")

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The body, a little at a time: whole it would be copied for each of the requests."""
        for start in range(0, len(self._body), _PIECE):
            yield self._body[start : start + _PIECE]

    async def _until_lost(self, slot: UpstreamSlot, work: Any) -> Any:
        """What ``work`` gives, unless the server is gone before. Raises CannotMeasure then."""
        doing = asyncio.ensure_future(work)
        slot.on_lost = lambda _: doing.cancel()
        try:
            return await doing
        except asyncio.CancelledError:
            if slot.lost:
                raise CannotMeasure(f"{self._subject.model.name}: {slot.lost}") from None
            raise
        finally:
            doing.cancel()
            slot.on_lost = None

    @property
    def _advice(self) -> str:
        return " (it was a small body of ours: give one with --body)" if self.small else ""

    async def close(self) -> None:
        await self._forwarder.close()


def _small_body(path: str) -> bytes:
    for end, body in _SMALL.items():
        if path.endswith(end):
            return msgspec.json.encode(body)
    raise BadAsk(f"--body is needed: what {path} takes is not known")
