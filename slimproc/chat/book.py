"""TemplateBook: which template a model's chats are rendered with: its own, or the file that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from slimproc.chat.templates import Rendered, Renderer, Template
from slimproc.errors import InvalidRequest
from slimproc.ipc import wire
from slimproc.request import ChatPrompt


class TemplateBook:
    """``overrides``: template sources by model, from the configuration."""

    def __init__(self, renderer: Renderer, overrides: Mapping[str, str]) -> None:
        self._renderer = renderer
        self._overrides = overrides
        self._made: dict[str, tuple[wire.ModelInfo, Template]] = {}

    def reconfigure(self, overrides: Mapping[str, str]) -> None:
        """Other overrides from now on."""
        self._overrides = overrides
        self._made.clear()

    async def render(self, model: str, info: wire.ModelInfo, chat: ChatPrompt) -> Rendered:
        """Render ``chat`` for a loaded model. Raises InvalidRequest for a refusal, a limit, or no template at all."""
        return await self._renderer.render(self._template(model, info), chat.messages)

    def _template(self, model: str, info: wire.ModelInfo) -> Template:
        known = self._made.get(model)
        if known is not None and known[0] is info:
            return known[1]
        source = self._overrides.get(model) or info.chat_template
        if not source:
            raise InvalidRequest(
                f"the model {model} has no chat template: use /v1/completions, or configure chat_template for it",
                param="messages",
            )
        template = Template(
            source=source,
            control_tokens=tuple(info.control_tokens),
            bos_token=info.bos_token,
            eos_token=info.eos_token,
        )
        self._made[model] = (info, template)
        return template
