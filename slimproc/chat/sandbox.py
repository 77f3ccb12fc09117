"""The jinja2 environment that chat templates are written for, immutable and sandboxed, and what its failures are called.

Templates come with model files: their authors are not trusted. The sandbox keeps them from running code; time and
memory are the process's business.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_MESSAGE: Final = 500
"""Characters of a template's own words that a caller gets to read."""

_NOT_ASCII = re.compile("[\u0080-\U0003ffff]")
# Not beyond: marks live there, and an escaped mark could not be taken out again.

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class RefusedByTemplate(TemplateError):
    """The template called ``raise_exception``."""


class OutputTooLong(Exception):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the rendered chat is longer than {limit} bytes")


class _GenerationTag(Extension):
    """``{% generation %}`` marks, for training, what an assistant said; here its body simply stands."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise RefusedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- templates pass it so
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # jinja2's own filter escapes <, >, & and ' for HTML, which models were not trained on.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match.group())[1:-1], text) if ensure_ascii else text


def environment() -> ImmutableSandboxedEnvironment:
    """An environment with the settings, globals and filters that templates on Hugging Face's hub rely on."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag], cache_size=0
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def describe_broken(error: Exception) -> str:
    """Why a template does not compile, for the caller."""
    if isinstance(error, TemplateSyntaxError):
        reason = f"{clip(error.message or 'syntax error')} (line {error.lineno})"
    elif isinstance(error, MemoryError):
        reason = "it needs more memory than is allowed"
    elif isinstance(error, (RecursionError, SyntaxError)):  # Python's compiler has limits of its own
        reason = "it nests too deeply"
    else:
        reason = f"it does not compile ({type(error).__name__})"
    return f"this model's chat template is broken: {reason}"


def describe_failure(error: Exception) -> str:
    """Why a render failed, for the caller: no stack, no path, no address."""
    match error:
        case RefusedByTemplate():
            return clip(error.message or "the chat template refuses these messages")
        case OutputTooLong():
            return str(error)
        case MemoryError():
            return "the chat template needed more memory than is allowed"
        case RecursionError():
            return "the chat template or the messages nest too deeply"
        case SecurityError():
            return "the chat template tried something that the sandbox forbids"
        case TemplateError() | TypeError() | ValueError() | ArithmeticError() | LookupError():
            return clip(f"the chat template cannot render these messages: {_ADDRESS.sub('', str(error))}")
        case _:
            return f"the chat template cannot render these messages: {type(error).__name__}"


def clip(text: str) -> str:
    """At most LONGEST_MESSAGE characters of ``text``, all of them such as can be sent."""
    text = text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"
    return text.encode(errors="replace").decode()
