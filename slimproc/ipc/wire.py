"""All messages that cross a process border, as frozen tagged structs; encoders and decoders are built once.

Three streams: *commands* go down the control socket (front to engine), *reports* come up it (load progress, READY,
answers to questions, slots that are not needed for now), and *frames* come up the ring (tokens, and what ends a sequence). Instants are monotonic.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from slimproc.request import GENERATE, Count, GrammarSpec, SamplingParams, Usage
from slimproc.settings import EngineSettings

# --- commands: front to engine ------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first command, once: what to be. ``epoch`` is this incarnation's number and comes back in READY."""

    epoch: int
    settings: EngineSettings
    step_limit: float = 60.0
    """Seconds after which the engine's own watchdog ends a step that never returns: it fires even where native code
    holds the interpreter, and leaves the Python stack in the log."""


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What an answer has said already, in an engine that died."""

    text: str
    tokens: Count
    """As many as it was generated from."""


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True, omit_defaults=True):
    """Start one sequence. ``rid`` is small, unique within the incarnation, and names it until its terminal event."""

    rid: int
    prompt: str | list[int]
    literals: list[tuple[int, int]] = []
    """Character spans of ``prompt`` (start, end) whose control-token texts are a caller's words, not control tokens."""
    chat: bool = False
    """A rendered template, which brings its own BOS when the model wants one."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Every token comes with its log probability and so many of the likeliest tokens in its place; None: none does."""
    sampling: SamplingParams = SamplingParams()
    grammar: GrammarSpec | None = None
    """None: any text. Else the sequence joins the batch once this is compiled, or fails."""
    said: Said | None = None
    """Not None: go on behind it. ``max_tokens`` and the usage count it as part of the answer."""


class Embed(msgspec.Struct, frozen=True, tag="embed", kw_only=True, omit_defaults=True):
    """Start one sequence that generates nothing and ends in an ``Embedded``. Control tokens in texts are not parsed."""

    rid: int
    prompt: str | list[int]
    name: str
    """What the caller calls this prompt; errors say it."""
    query: str | None = None
    """Not None: the rank of ``prompt`` as an answer to it is wanted."""
    dimensions: int | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    rid: int


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """``question`` numbers the answer. ``add_special``: with the model's own first and last tokens; ``parse_special``:
    control tokens in ``text`` are parsed.
    """

    question: int
    text: str
    add_special: bool
    parse_special: bool


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    question: int
    tokens: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Close the model and exit 0."""


Command = Load | Submit | Embed | Cancel | Tokenize | Detokenize | Shutdown
Start = Submit | Embed
"""What begins a sequence."""

# --- reports: engine to front, over the control socket -------------------------------------------------------

_Some = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is."""

    context: _Some
    """Tokens that one sequence may hold, prompt and answer together."""
    slots: _Some
    vocab_size: _Some
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    control_tokens: list[str] = []
    """Texts that become control tokens where they are parsed; the renderer marks them in callers' words."""
    capabilities: tuple[str, ...] = (GENERATE,)
    """What it can be asked for: ``request``'s words."""
    embedding_size: Count = 0
    """Values of a vector, where it makes vectors."""
    details: dict[str, str | int | float | bool] = {}
    """For people: threads, KV bytes, the model's own description."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading goes on; ``fraction`` is 0 to 1."""

    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    epoch: int
    model: ModelInfo
    load_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class LoadRefused(msgspec.Struct, frozen=True, tag="load_refused"):
    """The model cannot be served; the engine exits after it. ``permanent``: trying again cannot help.
    ``scarce``: it did not get the memory that it wanted.
    """

    message: str
    permanent: bool
    scarce: bool = False


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    question: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True, tag="detokenized"):
    question: int
    text: str


class QuestionRefused(msgspec.Struct, frozen=True, tag="question_refused"):
    question: int
    message: str
    param: str | None = None


MOST_ASIDE: Final = 32
"""Sequences of an engine that may be set aside at once: they have left admission's queue, which has a limit of its own."""


class Aside(msgspec.Struct, frozen=True, tag="aside"):
    """A sequence waits for its grammar, and others may have its slot meanwhile; or (False) it wants one again, and gets
    the next that becomes free in the engine.
    """

    rid: int
    aside: bool


Report = Progress | Ready | LoadRefused | Tokenized | Detokenized | QuestionRefused | Aside

# --- frames: engine to front, through the ring ---------------------------------------------------------------

STEP: Final = 1
EVENT: Final = 3
"""Frame types; ``ring.PAD`` is 2."""


class Tok(msgspec.Struct, array_like=True, gc=False):
    """What one step made of one sequence: ``tokens`` tokens whose text is ``text``.

    ``finish`` other than RUNNING makes it the sequence's terminal event, and ``usage`` is then set. Not frozen and
    without garbage-collector tracking because it is made once a token on both sides.
    """

    rid: int
    text: str
    tokens: Count = 1
    finish: int = 0
    usage: Usage | None = None


class Logprob(msgspec.Struct, array_like=True, gc=False):
    """One token's log probability (natural, finite). ``piece``: exactly its bytes, which need not be whole characters."""

    piece: bytes
    logprob: float | None
    """None: the first token of an echoed prompt, which nothing came before."""
    top: list[tuple[bytes, float]]
    """The likeliest tokens in its place, the likeliest first."""
    offset: int
    """Characters of the answer (with its echo) that were whole before it."""


class ScoredTok(Tok):
    """A ``Tok`` of a sequence whose log probabilities were asked for. ``logprobs``: of the tokens whose text begins in
    this one's, oldest first; together they are small enough for half a frame.
    """

    logprobs: list[Logprob] = []


class Step(msgspec.Struct, array_like=True, gc=False):
    """One step of the whole batch. ``at_ns`` is ``time.monotonic_ns()`` when it was done."""

    at_ns: int
    items: list[Tok]
    scored: list[ScoredTok] | None = None
    """Apart from ``items``, so that a token without log probabilities costs nothing for them. A sequence that is here
    is not in ``items``, too."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The terminal event of a sequence that could not be served. ``code`` is one of ``errors``'s codes."""

    rid: int
    code: str
    message: str
    param: str | None = None


class Embedded(msgspec.Struct, frozen=True, tag="embedded"):
    """A vector, or a part of one: little-endian float32; of a rank, its one value.

    The part that has ``usage`` is the last one and the sequence's terminal event.
    """

    rid: int
    vector: bytes
    usage: Usage | None = None


Event = Failed | Embedded

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_step = msgspec.msgpack.Decoder(Step).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
