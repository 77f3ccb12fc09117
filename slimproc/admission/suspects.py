"""Suspects: work in which an engine has died runs where nothing else does, and is poison after its second engine."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from slimproc.admission.generation import Generation
from slimproc.admission.quarantine import Quarantine
from slimproc.errors import Quarantined
from slimproc.replicas.life import Life
from slimproc.replicas.replica import Replica
from slimproc.request import Work


class Suspects:
    """One a server. Deaths are counted by what was asked for (``quarantine.py``), engines are kept free by request."""

    def __init__(self) -> None:
        self._quarantine = Quarantine()
        self._alone: WeakKeyDictionary[Life, Generation] = WeakKeyDictionary()
        """Engines that a suspect has for itself."""

    def refusal(self, request: Work) -> Quarantined | None:
        """What to tell who asks for it; None: it is no poison."""
        if not self._quarantine.refuses(request):
            return None
        return Quarantined(
            f"this very request has killed two engines of the model {request.model}; it is refused for ten minutes, "
            "and to try again does not help"
        )

    def note(self, request: Work, death: int) -> bool:
        """It was in the native call in which the engine numbered ``death`` died. True: it has just become poison."""
        return self._quarantine.note(request, death)

    def clear(self, model: str) -> None:
        """Forget what is held against the work of one model."""
        self._quarantine.clear(model)

    # --- company ------------------------------------------------------------------------------------------------------

    def places(self, request: Generation, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """The replicas that it may go to. A suspect goes where nothing else is, and nothing joins it before it has given
        text or ended: its second fatal call then takes nobody down with it, and nobody is blamed for a neighbour twice.
        """
        if self._alone:
            replicas = [
                one for one in replicas if one.serving is None or self._alone.get(one.serving, request) is request
            ]
        if self._quarantine.suspects(request.request):
            replicas = [
                one
                for one in replicas
                if one.serving is None or not one.serving.occupied or self._alone.get(one.serving) is request
            ]
        return replicas

    def placed(self, request: Generation, life: Life) -> None:
        """It is about to be handed a slot of ``life``."""
        if self._quarantine.suspects(request.request):
            self._alone[life] = request

    def acquit(self, request: Generation) -> bool:
        """It has given text, or ended: it may have company again. True: it had an engine for itself."""
        mine = [life for life, suspect in self._alone.items() if suspect is request]
        for life in mine:
            del self._alone[life]
        return bool(mine)
