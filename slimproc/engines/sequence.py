"""Sequence: the engine's state of one generation: its prompt, its limits, and the text it has made so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimproc.engines.scores import Score, Scorekeeper
from slimproc.engines.text import TextAssembler
from slimproc.ipc.wire import ScoredTok, Tok
from slimproc.request import Finish, SamplingParams, Usage

if TYPE_CHECKING:
    from slimproc.engines.grammar.matcher import GrammarMatcher
    from slimproc.ipc.wire import Submit


class Sequence:
    """One generation. The backend reads ``prompt`` and ``sampling`` and writes ``cached_tokens``; no one else does."""

    __slots__ = (
        "_push", "_quick", "cached_tokens", "echo_text", "generated", "grammar", "limit", "logprobs", "prompt",
        "prompt_text", "rid", "said", "sampling", "scores", "scores_prompt", "spoken", "state", "text", "unsaid",
    )  # fmt: skip

    def __init__(self, command: Submit, prompt: list[int], context: int, said: list[int] | None = None) -> None:
        """``prompt`` must leave room in ``context`` (tokens): the caller has checked it. ``said``: the tokens of
        ``command.said``, which need not.
        """
        self.rid = command.rid
        self.said = said or []
        """The end of ``prompt``, which is this answer's own beginning: penalties count it."""
        self.spoken = command.said.tokens if command.said is not None else 0
        """Tokens that were generated for it before; ``generated`` has those since."""
        self.prompt = [*prompt, *said] if said else prompt
        self.prompt_text = command.prompt if isinstance(command.prompt, str) else ""
        """For a backend that reads its prompt as text (the fake); empty when token ids were given."""
        self.sampling: SamplingParams = command.sampling
        room = max(0, context - len(self.prompt))
        self.limit = room if command.max_tokens is None else max(0, min(command.max_tokens - self.spoken, room))
        """Tokens that may be generated: by our own count, since a full KV cache refuses the whole batch."""
        self.logprobs = command.logprobs
        """How many alternatives each token is to name; None: it gets no log probability at all."""
        self.scores_prompt = command.echo and command.logprobs is not None
        """The backend evaluates the whole prompt for it, whatever it has cached, and gives ``PromptScored``."""
        self.echo_text = ""
        """What the caller is to hear of the prompt with its log probabilities; set before the sequence joins a batch."""
        self.grammar: GrammarMatcher | None = None
        """What the answer must look like; set before the sequence joins a batch, and then the backend's to follow."""
        self.scores = None if command.logprobs is None else Scorekeeper()
        self.text = TextAssembler(command.stop)
        self._push = self.text.push
        self._quick = self.text.plain
        """Whole characters can go straight out: no stop strings, and nothing is held back."""
        self.generated = 0
        self.cached_tokens = 0
        self.state: object = None
        """The backend's own."""
        self.unsaid = 0
        """Tokens generated whose text is still held back (a cut character, a possible stop string)."""

    def advance(self, piece: bytes, end: bool) -> Tok | None:  # noqa: FBT001  # the hot path
        """Take one token. Returns what the front should hear now, or None while the text is held back.

        ``end`` with an empty piece is the model's own end-of-generation token, which is not counted; any other token
        is, also one without text (a control token that is not the end). A piece that fills the limit says LENGTH even
        when the model would have ended there, since nobody asked it; but a grammar knows when it is complete.
        """
        if self._quick and not end and self.generated + 1 < self.limit:
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                text = ""
            if text:
                self.generated += 1
                return Tok(self.rid, text)
        return self._advance_with_care(piece, end)

    def _advance_with_care(self, piece: bytes, end: bool) -> Tok | None:  # noqa: FBT001
        """The same for every token; ``advance`` takes the common ones past it."""
        if not piece and end:
            return self._finish(Finish.STOP)
        self.generated += 1
        text = self._push(piece)
        if self.text.stopped or end or self.generated >= self.limit:
            self.unsaid += 1
            stop = self.text.stopped or (end and (self.generated < self.limit or self.grammar is not None))
            return self._finish(Finish.STOP if stop else Finish.LENGTH, text)
        if not text:
            self.unsaid += 1
            self._quick = False
            return None
        tokens, self.unsaid = self.unsaid + 1, 0
        self._quick = self.text.plain
        return Tok(self.rid, text, tokens)

    def advance_scored(self, score: Score, end: bool) -> list[ScoredTok]:  # noqa: FBT001  # as ``advance``
        """Take one token with its log probability, of a sequence that has ``scores``. Returns what the front should
        hear now; nothing while the text is held back.
        """
        assert self.scores is not None
        if score.piece or not end:
            self.scores.note(score, self.text.waiting)
        item = self.advance(score.piece, end)
        return [] if item is None else self.scores.release(item, stopped=self.text.stopped)

    def echo_scored(self, scores: list[Score], *, last: bool) -> list[ScoredTok]:
        """A part of the prompt's echo with its log probabilities; the ``last`` ends a sequence that was here for no more."""
        assert self.scores is not None
        items = self.scores.echo(self.rid, self.echo_text, scores, last=last)
        return [*items, *self.scores.release(self.end(Finish.LENGTH))] if last and not self.limit else items

    def end(self, finish: Finish) -> Tok:
        """The terminal event of a sequence that ends between two tokens (cancelled, or nothing to generate)."""
        return self._finish(finish)

    def _finish(self, finish: Finish, text: str = "") -> Tok:
        if not self.text.stopped:
            text += self.text.flush(cut=finish is not Finish.STOP)
            if self.text.stopped:  # a match that was waiting for an earlier one to grow
                finish = Finish.STOP
        prompt_tokens = len(self.prompt) - len(self.said)
        usage = Usage(prompt_tokens, self.spoken + self.generated, min(self.cached_tokens, prompt_tokens))
        return Tok(self.rid, text, self.unsaid, int(finish), usage)


def joined(one: Tok, following: Tok) -> Tok:
    """Two items of one sequence in one frame, as one."""
    return Tok(one.rid, one.text + following.text, one.tokens + following.tokens, following.finish, following.usage)
