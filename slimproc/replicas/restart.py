"""RestartPolicy: how long to wait before the next start of an engine that died, and when to give up. Pure."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

RETRY_AFTER = 60.0
"""Seconds after which a replica that was given up may be tried again, for somebody who asks for it."""


@dataclass
class RestartPolicy:
    """Counts the failures of one replica. All instants are monotonic seconds, given by the caller.

    The waits are Kubernetes' and systemd's idea (doubling with a cap), the first one zero, since most deaths are a
    single bad request; giving up is Erlang's (more than so many in so long).
    """

    first_wait: float = 1.0
    longest_wait: float = 60.0
    limit: int = 5
    window: float = 300.0
    healthy_after: float = 60.0
    endless: bool = False
    """It never gives up: what fails is not ours, and comes back when it comes back."""
    jitter: Callable[[], float] = random.random
    _failures: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _failed_loads: int = 0
    """In a row."""

    def failed(self, now: float, *, permanent: bool = False, loading: bool = False) -> float | None:
        """Note a failure at ``now``. Seconds to wait before the next start, or None: give up.

        ``loading``: it never became ready. However long its loads take, time alone does not make them right, so those in a
        row count without a window.
        """
        while self._failures and now - self._failures[0] > self.window:
            self._failures.popleft()
        self._failures.append(now)
        self._failed_loads += loading
        count = len(self._failures) if self.endless else max(len(self._failures), self._failed_loads)
        if not self.endless and (permanent or count >= self.limit):
            return None
        if count == 1:
            return 0.0
        wait = min(self.longest_wait, self.first_wait * 2.0 ** min(count - 2, 62))
        return wait * (0.75 + 0.5 * self.jitter())

    def loaded(self) -> None:
        """It has become ready."""
        self._failed_loads = 0

    def served(self, ready_since: float, now: float) -> None:
        """A request has finished well. Once the engine has also been ready for a minute, the past is forgiven."""
        if self._failures and now - ready_since >= self.healthy_after:
            self._failures.clear()

    def reset(self) -> None:
        """An operator asked for a fresh start."""
        self._failures.clear()
        self._failed_loads = 0

    @property
    def failures(self) -> int:
        return len(self._failures)
