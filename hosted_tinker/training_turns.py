"""Whose requests go to the trainer next. Pure: the caller brings the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hosted_tinker.run_queue import Job, RunQueue
from hosted_tinker.types import ForwardBackward


class TrainingTurns:
    """Runs take turns, the one that was longest without one first."""

    def __init__(self) -> None:
        self._queues: dict[str, RunQueue] = {}
        self._order: deque[str] = deque()

    def add(self, model_id: str, queue: RunQueue) -> None:
        self._queues[model_id] = queue
        self._order.append(model_id)

    def remove(self, model_id: str) -> None:
        del self._queues[model_id]
        self._order.remove(model_id)

    def take(
        self,
        now: float,
        max_joint_tokens: int,
        may_go: Callable[[Job], bool] = lambda _: True,
        *,
        in_turn: bool = True,
    ) -> list[Job]:
        """The ready job whose turn it is, and what shares its passes; empty if it may not go.

        Args:
            now: in the seconds of the queues' clock.
            max_joint_tokens: of `forward_backward` requests that go together.
            in_turn: false looks past jobs that may not go for one that may.
        """
        for model_id in self._order:
            queue = self._queues[model_id]
            first = queue.peek_ready(now)
            if first is None:
                continue
            if may_go(first):
                queue.pop_ready(now)
                self._put_last(model_id)
                return [first, *self._take_companions(first, now, max_joint_tokens)]
            if in_turn:
                return []
        return []

    def _take_companions(self, first: Job, now: float, max_joint_tokens: int) -> list[Job]:
        """Ready requests that together with the first have few enough tokens to share passes."""
        if not isinstance(first.work, ForwardBackward):
            return []
        room = max_joint_tokens - first.work.num_tokens
        taken: list[Job] = []
        # The first job's own run is the last in turn: the others go before its next request.
        for model_id in self._order:
            queue = self._queues[model_id]
            while (job := queue.peek_ready(now)) and isinstance(job.work, ForwardBackward):
                if job.work.num_tokens > room:
                    break
                room -= job.work.num_tokens
                queue.pop_ready(now)
                taken.append(job)
        for model_id in dict.fromkeys(job.model_id for job in taken):
            self._put_last(model_id)
        return taken

    def _put_last(self, model_id: str) -> None:
        self._order.remove(model_id)
        self._order.append(model_id)
