"""PromptReader: reads a prompt outside the generator, which keeps no logits of prompts, for its own tokens' scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimproc.engines.backend import PromptScored
from slimproc.engines.mlx.library import mx
from slimproc.engines.mlx.model import LoadedModel
from slimproc.engines.prompt_scores import SCORED_ROWS, PromptScorer
from slimproc.engines.sequence import Sequence


class PromptReader:
    """One sequence's. All but the prompt's last token is read, which is the generator's to answer."""

    def __init__(self, sequence: Sequence, model: LoadedModel) -> None:
        self._network = model.network
        self.tokens = sequence.prompt[:-1]
        self._scorer = PromptScorer(sequence, model.vocabulary, len(self.tokens))
        self._width = model.vocabulary.size
        self.cache: list[Any] = model.new_cache()
        """The KV of what was read of ``tokens``."""

    def read(self) -> PromptScored:
        """The next SCORED_ROWS tokens; the last when there is no other. Raises whatever the library does."""
        part = self.tokens[self._scorer.done :][:SCORED_ROWS]
        if not part:  # a prompt of one token
            return self._scorer.take(np.zeros((0, self._width), np.float32))
        logits = self._network(mx.array([part]), cache=self.cache)[0]
        mx.eval(logits)
        return self._scorer.take(np.asarray(logits))
