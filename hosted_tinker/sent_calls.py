"""The calls that the trainer has got and not answered yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hosted_tinker.futures import Future, Waiting
from hosted_tinker.run_queue import Job
from hosted_tinker.types import ForwardBackward, OptimStep


@dataclass(slots=True)
class SentCall:
    """A call, and the requests that it was made of.

    Attributes:
        jobs: several if they are passes.
        since: when the call before it had ended and this one was there.
        failed_pass: future of the pass before it whose failure has the trainer refuse this step.
    """

    jobs: Sequence[Job]
    reply: asyncio.Future[Any]
    since: float
    failed_pass: Future | None = None

    @property
    def is_pass(self) -> bool:
        return isinstance(self.jobs[0].work, ForwardBackward)

    @property
    def is_step(self) -> bool:
        return isinstance(self.jobs[0].work, OptimStep)


class SentCalls:
    """In the order in which they were sent, which is that in which they end."""

    def __init__(self) -> None:
        self._calls: deque[SentCall] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[SentCall]:
        return iter(self._calls)

    def add(self, jobs: Sequence[Job], reply: asyncio.Future[Any]) -> None:
        self._calls.append(SentCall(jobs, reply, time.monotonic()))

    def pop_ended(self) -> SentCall | None:
        """The oldest, if it has ended."""
        if not self._calls or not self._calls[0].reply.done():
            return None
        ended = self._calls.popleft()
        if self._calls:
            self._calls[0].since = time.monotonic()
        return ended

    @property
    def has_pass(self) -> bool:
        return any(call.is_pass for call in self._calls)

    @property
    def has_others(self) -> bool:
        """Than passes and steps."""
        return not all(call.is_pass or call.is_step for call in self._calls)

    def has_step_of(self, model_id: str) -> bool:
        return any(call.is_step and call.jobs[0].model_id == model_id for call in self._calls)

    def find_step_after(self, job: Job) -> SentCall | None:
        """The next step of the job's run."""
        for call in self._calls:
            first = call.jobs[0]
            if call.is_step and first.model_id == job.model_id and first.seq_id > job.seq_id:
                return call
        return None

    def describe(self, job: Job) -> Waiting | None:
        """For a client that polls; None for a job that is not among them."""
        for place, call in enumerate(self._calls):
            if job in call.jobs:
                running = f"running for {time.monotonic() - call.since:.0f} s"
                return Waiting("active", running if place == 0 else "next")
        return None
