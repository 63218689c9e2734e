"""The requests of one run, in the order in which they must run.

The SDK numbers the requests of a run 1, 2, 3, ... (`seq_id`; the request that creates the run is 0)
and may send them in any order: of a batch in chunks it sends the first chunk last. So a request
waits for those before it. A number may also never come, when a client gives a request up. That is
certain once a later request arrives that is not part of a batch in chunks, since the SDK sends it
only after everything before it was answered; otherwise a time limit decides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from hosted_tinker.errors import UserError
from hosted_tinker.futures import Future
from hosted_tinker.types import ForwardBackward, FutureResult, TrainingOperation

CREATE_SEQ_ID = 0
"""The request that creates a run comes before its first numbered one."""

Finish = Callable[[Any], Awaitable[FutureResult]]


@dataclass(slots=True, eq=False)
class Job:
    """A training request on its way.

    Attributes:
        work: what the trainer does, or the error of a request that can't run. That one fails in
            its turn, so that later ones are not stuck behind it.
        finish: makes the result of what the trainer returned; the next request does not wait for it.
        may_follow_later_ids: the SDK may send it after requests with higher numbers.
        computes_gradient: the next step's gradient misses a part if it fails.
        loaded_step: optimizer steps behind the checkpoint that a `LoadState` reads.
    """

    model_id: str
    seq_id: int
    work: ForwardBackward | TrainingOperation | UserError
    future: Future
    finish: Finish
    may_follow_later_ids: bool = False
    computes_gradient: bool = False
    loaded_step: int = 0


class RunQueue:
    """One run's waiting jobs. Pure: the caller brings the time, in seconds of any clock."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._next_seq_id = CREATE_SEQ_ID
        self._waiting: dict[int, Job] = {}
        self._gap_since: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def last_seq_id(self) -> int:
        """The highest number seen; what an old client's request without a number comes after."""
        return max(self._waiting, default=self._next_seq_id - 1)

    @property
    def missing_seq_id(self) -> int | None:
        """The number that the waiting jobs wait for."""
        return (
            self._next_seq_id if self._waiting and self._next_seq_id not in self._waiting else None
        )

    def push(self, job: Job, now: float) -> None:
        """Raises UserError for a number whose turn is over."""
        if job.seq_id < self._next_seq_id:
            raise UserError(
                f"seq_id {job.seq_id} came after seq_id {self._next_seq_id - 1} had been run; "
                "requests of a run take effect in the order of their seq_id"
            )
        self._waiting[job.seq_id] = job
        self._watch_gap(now)

    def peek_ready(self, now: float) -> Job | None:
        """The next job, if its turn has come. It stays."""
        if not self._waiting:
            return None
        if self._next_seq_id in self._waiting:
            return self._waiting[self._next_seq_id]
        first = min(self._waiting)
        if not self._gap_is_permanent(first, now):
            return None
        return self._waiting[first]

    def pop_ready(self, now: float) -> Job | None:
        """The next job, if its turn has come."""
        job = self.peek_ready(now)
        if job is not None:
            del self._waiting[job.seq_id]
            self._next_seq_id = job.seq_id + 1
            self._gap_since = None
            self._watch_gap(now)
        return job

    def wait_s(self, now: float) -> float | None:
        """Seconds until a gap counts as permanent; None where nothing waits for that."""
        if self._gap_since is None:
            return None
        return max(0.0, self._gap_since + self._gap_s - now)

    def _watch_gap(self, now: float) -> None:
        if self.missing_seq_id is None:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now

    def _gap_is_permanent(self, first: int, now: float) -> bool:
        closed = any(
            not job.may_follow_later_ids for seq_id, job in self._waiting.items() if seq_id >= first
        )
        timed_out = self._gap_since is not None and now - self._gap_since >= self._gap_s
        return closed or timed_out
