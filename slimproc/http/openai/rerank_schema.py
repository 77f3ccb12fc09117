"""The body of ``POST /v1/rerank``: Jina's and Cohere's, as other local servers have it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode
from slimproc.http.openai.call import VectorCall
from slimproc.http.openai.embeddings_schema import MAX_INPUTS

MAX_DOCUMENTS: Final = MAX_INPUTS


class RerankCall(VectorCall, frozen=True, kw_only=True):
    documents: list[str]
    top_n: int
    """Results that are wanted; at most one per document."""
    return_documents: bool


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """More than there are documents: all of them."""
    return_documents: bool | None = None

    def call(self) -> RerankCall:
        """Raises InvalidRequest."""
        texts = [entry if isinstance(entry, str) else entry.text for entry in self.documents]
        names = [f"documents[{index}]" for index in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            if not text:
                raise InvalidRequest(f"{name}: is empty", param=name)
        return RerankCall(
            model=self.model,
            prompts=list(texts),
            names=names,
            query=self.query,
            documents=texts,
            top_n=min(self.top_n or len(texts), len(texts)),
            return_documents=bool(self.return_documents),
        )


_body = msgspec.json.Decoder(RerankBody)


def parse_rerank(body: bytes) -> RerankCall:
    """Raises InvalidRequest, whose ``param`` names the field, or the item (``documents[3]``)."""
    return decode(body, _body).call()
