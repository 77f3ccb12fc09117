"""Whether a request fits the model that would do it: what only the model's own numbers, known once it is loaded, can say."""

from __future__ import annotations

from slimproc.errors import ContextLengthExceeded, InvalidRequest
from slimproc.ipc.wire import ModelInfo
from slimproc.request import EMBED, GENERATE, RERANK, EmbedRequest, GenerateRequest, Work


def refusal(request: Work, model: ModelInfo) -> InvalidRequest | None:
    """What to tell the caller; None: it fits.

    The engine would refuse most of it as well, but one prompt after the other: the stream of a list would have begun
    with its first by the time its last is refused.
    """
    if request.capability not in model.capabilities:
        can = " and ".join(_DOES[capability] for capability in model.capabilities if capability in _DOES)
        return InvalidRequest(
            f"the model {request.model} {_DOES_NOT[request.capability]}: it {can or 'does nothing that is known here'}",
            param="model",
        )
    return _of_vectors(request, model) if isinstance(request, EmbedRequest) else _of_prompts(request, model)


_DOES = {
    GENERATE: "generates text (/v1/chat/completions, /v1/completions)",
    EMBED: "makes embeddings (/v1/embeddings)",
    RERANK: "ranks documents (/v1/rerank)",
}
_DOES_NOT = {
    GENERATE: "does not generate text",
    EMBED: "does not make embeddings",
    RERANK: "has no head to rank documents with",
}


def _of_vectors(request: EmbedRequest, model: ModelInfo) -> InvalidRequest | None:
    if request.dimensions is None or request.dimensions <= model.embedding_size:
        return None
    return InvalidRequest(
        f"dimensions: {request.dimensions} is more than the {model.embedding_size} that this model's vectors have",
        param="dimensions",
    )


def _of_prompts(request: GenerateRequest, model: ModelInfo) -> InvalidRequest | None:
    for prompt in request.prompts:
        if isinstance(prompt, list):
            if len(prompt) >= model.context:
                return ContextLengthExceeded(
                    f"this model's context is {model.context} tokens, and the prompt alone has {len(prompt)}",
                    param="prompt",
                )
            if (highest := max(prompt, default=0)) >= model.vocab_size:
                return InvalidRequest(
                    f"token id {highest} is not in this model's vocabulary (0 to {model.vocab_size - 1})",
                    param="prompt",
                )
    return None
