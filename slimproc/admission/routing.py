"""Router: which of a model's replicas gets a request, by ``policy.choose`` and what was read where before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from slimproc.admission import affinity, policy
from slimproc.admission.admitted import Admitted
from slimproc.admission.affinity import PrefixMemory
from slimproc.admission.generation import Generation
from slimproc.admission.policy import ReplicaView
from slimproc.admission.suspects import Suspects
from slimproc.replicas.life import Life
from slimproc.replicas.replica import Replica
from slimproc.request import GENERATE


class Router:
    """Remembers the beginnings of prompts by engine, as long as that lives."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._prefixes: WeakKeyDictionary[Life, PrefixMemory] = WeakKeyDictionary()

    def place(self, request: Admitted, replicas: Sequence[Replica]) -> Life | None:
        """Where the request's next slot is to be taken, now; None: nowhere."""
        replicas = self._candidates(request, replicas)
        prefix: affinity.Chain = ()
        # With one replica there is nothing to choose by, and only generating keeps what was read.
        if len(replicas) > 1 and isinstance(request, Generation) and request.request.capability == GENERATE:
            prefix = affinity.chain(request.next_prompt)
        chosen = policy.choose([self._view_for(prefix, replica) for replica in replicas])
        if chosen is None:
            return None
        life = replicas[chosen].serving
        assert life is not None, "only a serving replica has free slots"
        if prefix:
            self._prefixes.setdefault(life, PrefixMemory(life.slots)).note(prefix)
        if isinstance(request, Generation):
            self._suspects.placed(request, life)
        return life

    def _candidates(self, request: Admitted, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Leaves out the replica that the request could not reach, if another serves, and those that must be left alone."""
        if isinstance(request, Generation):
            return self._suspects.places(request, replicas)
        if not request.avoids:
            return replicas
        others = [replica for replica in replicas if replica.name != request.avoids]
        return others if any(replica.serving is not None for replica in others) else replicas

    def _view_for(self, prefix: affinity.Chain, replica: Replica) -> ReplicaView:
        memory = self._prefixes.get(replica.serving) if replica.serving is not None and prefix else None
        seen = view(replica)
        return replace(seen, known_blocks=memory.longest(prefix), known_prompts=len(memory)) if memory else seen


def serving(replicas: Sequence[Replica]) -> list[Life]:
    """The lives that take new work now."""
    return [life for replica in replicas if (life := replica.serving) is not None]


def view(replica: Replica) -> ReplicaView:
    """A replica as ``policy.py`` sees it."""
    life = replica.serving
    return ReplicaView(
        state=replica.state,
        free_slots=life.free_slots if life else 0,
        occupied=life.occupied if life else 0,
        load_failed=replica.load_failed,
        seconds_in_state=time.monotonic() - replica.changed_at,
        renewed=replica.renewed,
    )
