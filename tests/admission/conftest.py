"""An admission controller over fake replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slimproc.admission.controller import AdmissionController, ModelLimits
from slimproc.admission.generation import Generation
from slimproc.chat.templates import Rendered
from slimproc.metrics import Metrics
from slimproc.request import GenerateRequest
from tests.fakes import FakeReplica, FakeSupervisor, request, streams_for


class Desk:
    """The controller of models with their replicas, and what a test asks of it. Make it inside a running loop."""

    def __init__(
        self,
        *replicas: FakeReplica,
        max_queue: int = 32,
        max_queue_total: int = 256,
        refuse_while_loading: bool = False,
        strict: bool = False,
        render: Any = None,
    ) -> None:
        self.replicas = replicas or (FakeReplica(),)
        models = dict.fromkeys(replica.model for replica in self.replicas)
        self.metrics = Metrics(models)
        self.controller = AdmissionController(
            FakeSupervisor(list(self.replicas)),
            self.metrics,
            render or self._render,
            models=dict.fromkeys(models, ModelLimits(max_queue)),
            max_queue_total=max_queue_total,
            refuse_while_loading=refuse_while_loading,
            strict=strict,
        )
        for replica in self.replicas:
            replica.on_change = self.controller.on_replica_change
        self.rendered = 0

    async def _render(self, model: str, info: Any, chat: Any) -> Rendered:
        self.rendered += 1
        return Rendered("rendered", [(0, 3)])

    @property
    def replica(self) -> FakeReplica:
        return self.replicas[0]

    def submit(self, wanted: GenerateRequest | None = None, **fields: Any) -> Generation:
        wanted = wanted or request(**fields)
        return self.controller.submit(wanted, streams_for(wanted))

    def outcomes(self, model: str = "m") -> dict[str, int]:
        """Requests by outcome and refusals by reason, without zeros."""
        numbers = self.metrics.model(model)
        return {name: count for name, count in (numbers.requests | numbers.rejected).items() if count}


@pytest.fixture
def open_desk() -> Callable[..., Desk]:
    return Desk
