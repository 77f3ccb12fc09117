"""Suspects: work in which an engine has died is put on trial, and is poison after its second engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from slimproc.admission.admitted import Admitted
from slimproc.admission.generation import Generation
from slimproc.admission.quarantine import Quarantine, Suspect, digest_of
from slimproc.errors import Quarantined
from slimproc.replicas.life import Life
from slimproc.replicas.replica import Replica

PATIENCE: Final = 5.0
"""Seconds after the death (or after it was asked for anew) that a suspect waits for an engine without other work. The
suspects of a wide batch would else be answered one after the other."""


class Suspects:
    """One per server. A suspect's trial lasts from its slot to its first text (or its end): meanwhile nothing joins it, and
    it alone is blamed when the engine dies.
    """

    def __init__(self, running: Collection[Admitted], on_patience_over: Callable[[str], None]) -> None:
        """``running``: all that is admitted, as it is at any time. ``on_patience_over`` is told of a model for which a
        place should be looked for again.
        """
        self._running = running
        self._on_patience_over = on_patience_over
        self._quarantine = Quarantine()
        self._trials: WeakKeyDictionary[Life, Generation] = WeakKeyDictionary()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def refusal(self, model: str, work: Suspect) -> Quarantined | None:
        """What to tell who asks for it; None: it is not poison."""
        if not self._quarantine.refuses(model, work):
            return None
        return Quarantined(
            f"this very request has killed two engines of the model {model}; it is refused for ten minutes, "
            "and to try again does not help"
        )

    def note(self, model: str, work: Suspect, death: int) -> bool:
        """It was in the native call in which the engine numbered ``death`` died. True: it has just become poison."""
        return self._quarantine.note(model, work, death)

    def is_blamed(self, request: Generation) -> bool:
        """Not where other work was on trial in the same engine: that is the likelier cause."""
        trials = [one for one in self._trials.values() if one.engine_name == request.engine_name]
        return not trials or digest_of(request.request) in {digest_of(one.request) for one in trials}

    def clear(self, model: str) -> None:
        """Forget what is held against the work of one model."""
        self._quarantine.clear(model)

    # --- trials -------------------------------------------------------------------------------------------------------

    def places(self, request: Generation, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """The replicas that it may go to: none where another is on trial; for a suspect, while it is patient, one where
        nothing runs but copies of itself.
        """
        if self._trials:
            replicas = [
                one for one in replicas if one.serving is None or self._trials.get(one.serving, request) is request
            ]
        since = self._quarantine.suspected_since(request.request.model, request.request)
        if since is None:
            return replicas
        patient = max(since, request.arrived) + PATIENCE - time.monotonic()
        if patient <= 0:
            return replicas
        empty = [one for one in replicas if one.serving is None or self._has_for_itself(request, one.serving)]
        if len(empty) < len(replicas):
            self._look_again(request.request.model, patient)
        return empty

    def placed(self, request: Generation, life: Life) -> None:
        """It is about to be handed a slot of ``life``."""
        if self._quarantine.suspected_since(request.request.model, request.request) is not None:
            self._trials[life] = request

    def acquit(self, request: Generation) -> bool:
        """It has given text, or ended: its trial is over. True: it had one."""
        mine = [life for life, suspect in self._trials.items() if suspect is request]
        for life in mine:
            del self._trials[life]
        return bool(mine)

    def pardon(self, request: Generation) -> None:
        """It has ended well."""
        self._quarantine.pardon(request.request.model, request.request)

    def _has_for_itself(self, request: Generation, life: Life) -> bool:
        if not life.occupied:
            return True
        digest = digest_of(request.request)
        return life.occupied == sum(
            held
            for one in self._running
            if isinstance(one, Generation) and (held := one.sequences_in(life)) and digest_of(one.request) == digest
        )

    def _look_again(self, model: str, seconds: float) -> None:
        if model not in self._timers:
            self._timers[model] = asyncio.get_running_loop().call_later(seconds, self._patience_over, model)

    def _patience_over(self, model: str) -> None:
        del self._timers[model]
        self._on_patience_over(model)
