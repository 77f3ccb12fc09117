"""A chat's messages: one struct per role, and the plain dicts that the model's template is given.

Decisions, where OpenAI's text leaves room or templates cannot follow it:

- ``developer`` becomes ``system``: it is OpenAI's newer name for it, and hardly any open model's template knows it.
- Text parts are joined by a newline, for every role, as llama.cpp and vLLM do: parts are blocks, not halves of words.
- An assistant's absent or null content is ``""``: a template that prints it unasked would print "None". It needs
  tool calls beside it, or a ``refusal``, which then is what the assistant said.
- Tool calls go to the template as they came, ``arguments`` a JSON string.
- Keys that are not named here are ignored, as in the body.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import unsupported

PART_JOINER: Final = "\n"

MAX_MESSAGES: Final = 8192
"""More than any context holds that we serve, and it bounds the time that one body can take from the event loop."""


class TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class SaidPart(msgspec.Struct):
    """A part of an assistant's: a text, or a refusal, which has its words in the field that is named so."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    def words(self, path: str) -> str:
        """Raises InvalidRequest where they are missing."""
        words = self.text if self.type == "text" else self.refusal
        if words is None:
            raise InvalidRequest(f"{path}.{self.type}: is required", param=f"{path}.{self.type}")
        return words


Content = str | Annotated[list[TextPart], Meta(min_length=1)]
SaidContent = str | Annotated[list[SaidPart], Meta(min_length=1)]


def joined(content: Content) -> str:
    return content if isinstance(content, str) else PART_JOINER.join([part.text for part in content])


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class _Said(msgspec.Struct, tag_field="role"):
    """A message that must have content."""

    content: Content
    name: str | None = None

    def plain(self, path: str) -> dict[str, Any]:  # noqa: ARG002 - the assistant's needs it
        message = {"role": self.__struct_config__.tag, "content": joined(self.content)}
        if self.name is not None:
            message["name"] = self.name
        return message


class SystemMessage(_Said, tag="system"):
    pass


class DeveloperMessage(_Said, tag="developer"):
    def plain(self, path: str) -> dict[str, Any]:
        return super().plain(path) | {"role": "system"}


class UserMessage(_Said, tag="user"):
    pass


class ToolMessage(_Said, tag="tool"):
    tool_call_id: str | None = None

    def plain(self, path: str) -> dict[str, Any]:
        message = super().plain(path)
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class AssistantMessage(msgspec.Struct, tag="assistant", tag_field="role"):
    content: SaidContent | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: dict[str, msgspec.Raw] | None = None

    def plain(self, path: str) -> dict[str, Any]:
        """Raises InvalidRequest for a turn that says nothing."""
        if self.function_call is not None:
            raise unsupported(f"{path}.function_call", "replaced by tool_calls")
        content = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            parts = [part.words(f"{path}.content[{index}]") for index, part in enumerate(content)]
            content = PART_JOINER.join(parts)
        if content is None and not self.tool_calls:
            raise InvalidRequest(f"{path}.content: is required where there are no tool_calls", param=f"{path}.content")
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = msgspec.to_builtins(self.tool_calls)
        return message


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """What the template gets. Raises InvalidRequest."""
    return [message.plain(f"messages[{index}]") for index, message in enumerate(messages)]
