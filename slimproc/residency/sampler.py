"""Sampler: keeps a probe going, and tells what all devices' memory is, four times a second and whatever the driver does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from slimproc import logs
from slimproc.residency.probes.host import sample_host
from slimproc.residency.probes.lines import EXIT_ANEW, Line
from slimproc.residency.probes.process import ProbeProcess
from slimproc.residency.probes.remembered import RememberedGpus
from slimproc.residency.probes.shares import Bytes
from slimproc.residency.views import HOST, Sample

log = logs.get("slimproc.probe")

_MOST_BAD_LINES: Final = 5
"""In a row, before a probe is taken for broken."""
_SHORTEST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 30.0
"""Seconds before another probe, doubled from one to the other while none of them lives long."""
_LONG_LIFE: Final = 30.0
_MOST_UNDEAD: Final = 3
"""Probes that were killed and hang in the driver all the same. With so many, no more are started."""
_REAP_LIMIT: Final = 1.0
"""Seconds that the exit of a child is waited for."""
_REAP_EVERY: Final = 0.01


@dataclass(frozen=True)
class SamplerStatistics:
    """``probes``: how many were started; ``silent``: how many of them were killed since they said nothing for too long;
    ``undead``: how many were killed and are still there; ``own``: samples of the host that the front took itself.
    """

    probes: int
    silent: int
    undead: int
    own: int
    samples: int


class Sampler:
    """One per server. ``run`` is its task; ``on_sample`` is called in it, and what it raises ends ``run``."""

    def __init__(
        self,
        on_sample: Callable[[Sample], None],
        *,
        environ: Mapping[str, str],
        host_limit: int | None = None,
        stale_after: float = 2.0,
        start_limit: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``environ`` is the probe's whole environment: slimproc has to be found with it. ``stale_after``: seconds without a
        word before a probe is killed; ``start_limit``: the same for its first, before which the driver has to wake up.
        """
        self._on_sample = on_sample
        self._environ = dict(environ)
        self._host_limit = host_limit
        self._stale_after = stale_after
        self._start_limit = start_limit
        self._clock = clock
        self._leaders: frozenset[int] = frozenset()
        self._gpus = RememberedGpus()
        self._probe: ProbeProcess | None = None
        self._undead: list[ProbeProcess] = []
        self._probes = self._silent = self._own = self._samples = 0
        self._heard: float | None = None
        """When the newest line of a probe was taken."""
        self.latest: Sample | None = None

    def __repr__(self) -> str:
        pid = self._probe.pid if self._probe else None
        return f"<Sampler probe={pid} watching {len(self._leaders)}>"

    def statistics(self) -> SamplerStatistics:
        self._bury()
        return SamplerStatistics(self._probes, self._silent, len(self._undead), self._own, self._samples)

    @property
    def driver(self) -> str | None:
        """What a probe said last of the NVIDIA driver: empty (it works), ``absent`` (no GPU), or a fault, with which nobody
        knows all GPUs that there are. None: no probe has answered yet.
        """
        return self._gpus.driver

    @property
    def probe_pid(self) -> int | None:
        return self._probe.pid if self._probe else None

    def watch(self, leaders: Iterable[int]) -> None:
        """From now on the process groups of ``leaders`` are the ones whose bytes are told apart. A change brings a sample."""
        wanted = frozenset(leaders)
        if wanted != self._leaders:
            self._leaders = wanted
            if self._probe is not None:
                self._probe.watch(wanted)

    def sample_now(self) -> Sample:
        """A sample that the front takes itself, without a probe: of the host alone, for no GPU can be asked (those that are
        known have a fault). It is not published. Takes well under a millisecond, and more with many processes.
        """
        taken = self._clock()
        host = sample_host(self._leaders, self._host_limit, of_tree=self._as_told)
        return Sample(taken, {HOST: host, **self._gpus.silent(host)})

    def _as_told(self, leader: int, found: Mapping[int, Bytes]) -> Bytes:
        """Of processes that may share memory, what the probe said last: to ask the kernel takes longer than the front has.
        Before it has said anything, no more than the largest has, so that nothing counts twice.
        """
        host = self.latest.devices[HOST] if self.latest is not None else None
        if host is not None and host.attributed and leader in host.attributed:
            return Bytes(host.attributed[leader], host.mapped.get(leader, 0))
        return Bytes(max(each.private for each in found.values()), max(each.mapped for each in found.values()))

    async def run(self) -> None:
        """Sample until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_probing(), name="probe")
                group.create_task(self._fill_in(), name="probe's stand-in")
        finally:
            await self.close()

    async def close(self) -> None:
        """Kill the probe, and wait a moment for what was killed; a probe that hangs in the driver is left to the system."""
        if self._probe is not None:
            self._part_with(self._probe)
        deadline = self._clock() + _REAP_LIMIT
        while self._undead and self._clock() < deadline:
            self._bury()
            await asyncio.sleep(_REAP_EVERY if self._undead else 0)

    # --- one probe after another --------------------------------------------------------------------------------

    async def _keep_probing(self) -> None:
        anew = False
        delay = _SHORTEST_DELAY
        while True:
            began = self._clock()
            code, reason = await self._live(anew=anew)
            anew = code == EXIT_ANEW
            if self._clock() - began >= _LONG_LIFE:
                delay = _SHORTEST_DELAY
            if anew:
                log.debug("the memory probe looks anew")
            else:
                log.warning("the memory probe ended, and another one follows", reason=reason, seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _live(self, *, anew: bool) -> tuple[int | None, str]:
        """One probe from its start to its end: its exit status, if it ended itself, and why there is an end."""
        self._bury()
        if len(self._undead) >= _MOST_UNDEAD:
            return None, f"{len(self._undead)} of them were killed and hang in the driver"
        try:
            probe = ProbeProcess(self._environ, self._host_limit, anew=anew, clock=self._clock)
        except OSError as error:
            return None, f"it could not be started: {error.strerror}"
        self._probe = probe
        self._probes += 1
        try:
            probe.watch(self._leaders)
            if reason := await self._listen(probe):
                return None, reason
            code = await self._exit_code(probe)
            return code, _how(code)
        finally:
            if self._probe is probe:
                self._part_with(probe)

    async def _listen(self, probe: ProbeProcess) -> str:
        """Publish what the probe says, until it ends; else why it is to be ended."""
        deadline = self._clock() + self._start_limit
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    await probe.news.wait()
            late = self._clock() >= deadline
            line = probe.read()  # also when it is late: it may be the loop that was held up, and not the probe
            if line is not None:
                deadline = self._clock() + self._stale_after
                self._take(line)
            elif probe.ended:
                return ""
            elif probe.bad_lines >= _MOST_BAD_LINES:
                return "it writes nonsense"
            elif late:
                self._silent += 1
                return "it said nothing for too long"

    def _take(self, line: Line) -> None:
        self._heard = max(line.taken, self._heard or line.taken)
        if self.latest is None or line.taken > self.latest.taken:
            self._publish(Sample(line.taken, self._gpus.devices_of(line)))

    def _publish(self, sample: Sample) -> None:
        self.latest = sample
        self._samples += 1
        self._on_sample(sample)

    async def _exit_code(self, probe: ProbeProcess) -> int | None:
        deadline = self._clock() + _REAP_LIMIT
        while probe.exit_code is None and self._clock() < deadline:  # noqa: ASYNC110  # a wait status is no event
            await asyncio.sleep(_REAP_EVERY)
        return probe.exit_code

    def _part_with(self, probe: ProbeProcess) -> None:
        probe.kill()
        probe.close()
        self._probe = None
        self._undead.append(probe)
        self._bury()

    def _bury(self) -> None:
        self._undead = [probe for probe in self._undead if probe.exit_code is None]

    # --- while there is none --------------------------------------------------------------------------------------

    async def _fill_in(self) -> None:
        """While no probe speaks, the host at least goes on being sampled: models that need no GPU have nothing to do with
        a driver that hangs.
        """
        silent_until = self._clock() + self._start_limit
        while True:
            await asyncio.sleep(self._stale_after / 4)
            self._bury()
            heard = silent_until if self._heard is None else self._heard
            if self._clock() - heard > 1.5 * self._stale_after:  # by then the probe has been given up
                self._own += 1
                self._publish(self.sample_now())


def _how(code: int | None) -> str:
    if code is None:
        return "it closed its output"
    if code >= 0:
        return f"it exited with {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
