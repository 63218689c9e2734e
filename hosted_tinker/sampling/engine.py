"""What an embedded sampling engine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hosted_tinker.types import BaseModelInfo, Sample, SampleOutput
from hosted_tinker.workers.messages import Failure

FinishSample = Callable[[str, SampleOutput | Failure], None]
"""Called with (request_id, result) when a request ends."""


class SamplingEngine(Protocol):
    """Generates for many requests at once, one token for each running sequence per step.

    A worker process owns it and calls it on one thread: `add` whenever requests arrive, `step`
    while `has_work`.
    """

    def describe_base_model(self) -> BaseModelInfo:
        """What the API process needs to know of the model."""
        ...

    def add(self, sample: Sample) -> None:
        """Queues a request. What is wrong with it is reported through its result."""
        ...

    def cancel(self, request_id: str) -> None:
        """Drops a request, waiting or running, and ends it with a failure."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> None:
        """Admits waiting requests and advances every running sequence by one token."""
        ...
