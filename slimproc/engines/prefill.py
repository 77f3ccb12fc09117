"""How much of a prompt is read in one call, so that running answers go on and a cancel is soon heard. Pure."""

from __future__ import annotations

_STEP_STRETCH = 2.5
"""A step with prompt tokens in it takes at most so many quiet steps. The promise is 3; the rest is for noise."""
_ALONE_SECONDS = 0.25
"""How long a call may take while no answer is running, or few beside many prompts: nothing can be cancelled meanwhile."""
_BURST_SECONDS = 3.0
"""For how long answers that run may be kept waiting by a burst of prompts that outnumber them."""
_ALONE_BLOCK = 64
"""Alone, a call takes whole multiples of so many: ggml reads 64 tokens 1.4 times as fast a token as 63 or 65."""
_UNKNOWN_ALONE, _UNKNOWN_BESIDE = 64, 8
"""Before anything was measured."""
_MANY = 7
"""Beside so many running answers a step is stretched for nobody's pace. Fewer are not worth a slow prompt."""
_DEARER = 1.25
"""At most so many times an answer's share of a quiet step is what a token of a prompt is taken to cost."""
_DOWN, _UP = 0.5, 0.1
"""Weights of a new sample. What else runs on the machine only ever makes a step longer, so shorter is believed sooner."""


class PrefillBudget:
    """How many prompt tokens the next call may take, learned from how long calls took. Times in seconds.

    ``most``: what a call can take. ``least``: what makes a call worth its pass over the weights, beside answers that have a
    call of their own; fewer only where those would take longer than ``_ALONE_SECONDS``, or beside ``_MANY`` answers.
    """

    def __init__(self, most: int, *, least: int = 1) -> None:
        self._most = most
        self._least = least
        self._quiet: dict[int, float] = {}
        """Seconds of a step without prompt tokens, by the number of running answers."""
        self._measured: set[int] = set()
        """The numbers of answers whose quiet step was seen, and not only reckoned."""
        self._beside: float | None = None
        """Seconds that one prompt token adds to a step with running answers."""
        self._alone: float | None = None

    def tokens(self, running: int, prompts: int = 1) -> int:
        """Prompt tokens for the next call, beside ``running`` answers; at least 1, so that every prompt gets on.

        ``prompts``: how many there are. Where more wait for their first token than for their next one, those come first.
        """
        if running == 0:
            if self._alone is None:
                return min(_UNKNOWN_ALONE, self._most)
            blocks = max(int(_ALONE_SECONDS / self._alone / _ALONE_BLOCK), 1)
            return min(blocks * _ALONE_BLOCK, self._most)
        least = self._least if running < _MANY else 1
        quiet, price = self._quiet_step(running), self._beside or self._alone
        if quiet is None or price is None:
            return min(max(_UNKNOWN_BESIDE, least), self._most)
        if running in self._measured:
            # A token costs the same whosever it is, but for what it attends to: none of a prompt costs much more than an
            # answer's. A busy machine's measurements say otherwise, and feed on themselves: the fewer tokens share the
            # noise, the dearer each seems.
            price = min(price, _DEARER * quiet / running)
        promised = (_STEP_STRETCH - 1) * quiet
        wanted = max(promised * prompts / running, least * price)
        seconds = max(promised, min(wanted, _ALONE_SECONDS))
        return min(max(int(seconds / price), 1), self._most)

    def comes_first(self, running: int, prompts: int, tokens: int) -> bool:
        """Whether the running answers wait while ``prompts``, of ``tokens`` together, are read: they are more, and short.

        So a burst of requests is answered in one batch, as it came, instead of in many that grow and shrink.
        """
        price = self._beside or self._alone
        return 0 < running < prompts and price is not None and tokens * price <= _BURST_SECONDS

    def observe(self, running: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a call with ``running`` answers and ``prompt_tokens`` tokens of prompts that took ``seconds``."""
        if prompt_tokens == 0:
            known = self._quiet.get(running) if running in self._measured else None
            self._quiet[running] = _blend(known, seconds)
            self._measured.add(running)
        elif running == 0:
            if prompt_tokens >= _ALONE_BLOCK // 4:  # the rest of a prompt says little about a whole chunk
                self._alone = _blend(self._alone, seconds / prompt_tokens)
        else:
            self._observe_mixed(running, prompt_tokens, seconds)

    def observe_apart(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a call with nothing but prompts in it, made beside running answers that have one of their own."""
        self._beside = _blend(self._beside, seconds / prompt_tokens)

    def _observe_mixed(self, running: int, prompt_tokens: int, seconds: float) -> None:
        """Only a sum was seen: what is known of one part gives the other.

        Under steady load a step without prompts may never come; the chunks must not stay as small as at the start.
        """
        price = self._beside or self._alone
        if price is None:
            self._beside = seconds / (prompt_tokens + running)
        elif running not in self._quiet:
            # Two thirds, because the pass that the prompt's tokens cost of their own is in the rest as well.
            rest = max(seconds - price * prompt_tokens, 0.3 * seconds) * 2 / 3
            self._quiet[running] = max(rest, self._quiet_step(running) or 0.0)
        else:
            beside = max(seconds - self._quiet[running], 0.1 * seconds) / prompt_tokens
            self._beside = _blend(self._beside, beside)

    def _quiet_step(self, running: int) -> float | None:
        """The step of as many answers, or else of the nearest fewer (a step only grows), or a share of one of more."""
        if running in self._quiet:
            return self._quiet[running]
        fewer = [count for count in self._quiet if count < running]
        if fewer:
            return self._quiet[max(fewer)]
        more = [count for count in self._quiet if count > running]
        return self._quiet[min(more)] * running / min(more) if more else None


def _blend(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + (new - old) * (_DOWN if new < old else _UP)
