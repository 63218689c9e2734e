"""Where a training run stands, between its requests."""

from __future__ import annotations

from dataclasses import dataclass

from hosted_tinker.errors import UserError, WorkerDiedError
from hosted_tinker.futures import Future
from hosted_tinker.run_queue import RunQueue
from hosted_tinker.types import CreateModel, ForwardBackward, LoadState, TrainingOperation


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands.

    Attributes:
        generation: how often its weights have changed since it came into memory.
        step: its optimizer steps, those before the checkpoint that it came from included.
    """

    generation: int
    step: int


class RunState:
    """A run's queue, and what must be remembered between its requests.

    Attributes:
        progress: of its weights.
        lost: the trainer process that held it died.
        closing: it leaves memory when its queue is empty.
        is_held: it was to leave memory, and had to wait.
        failed_passes: futures of forward_backward requests that failed since the last step was sent.
        last_pass_accepted_at: when the newest forward_backward that succeeded since the last step
            was accepted.
    """

    def __init__(self, gap_s: float) -> None:
        self.queue = RunQueue(gap_s)
        self.progress = RunProgress(0, 0)
        self.lost = False
        self.closing = False
        self.is_held = False
        self.failed_passes: list[Future] = []
        self.last_pass_accepted_at = 0

    @property
    def may_leave(self) -> bool:
        return self.closing and not self.queue

    def take_unacknowledged_failure(self) -> Future | None:
        """The first of the failed passes that a step must not be taken after. Forgets them all.

        A client that sends another forward_backward after it got the failure of one has decided to
        go on without it. A step that comes without that, as when both were sent together, misses a
        part of its gradient.
        """
        unacknowledged = [
            future
            for future in self.failed_passes
            if future.delivered_at is None or future.delivered_at > self.last_pass_accepted_at
        ]
        self.failed_passes.clear()
        return next(iter(unacknowledged), None)


def check_not_lost(run: RunState, operation: ForwardBackward | TrainingOperation) -> None:
    """Raises WorkerDiedError for a run that went with the trainer, unless the operation makes it anew."""
    creates = isinstance(operation, CreateModel) or (
        isinstance(operation, LoadState) and operation.create
    )
    if run.lost and not creates:
        raise WorkerDiedError(
            "the trainer process was restarted and this run's unsaved state is lost; create a "
            "training client from its last checkpoint"
        )


def make_refusal(failed_pass: Future) -> UserError:
    """Of a step whose gradient misses a part."""
    return UserError(
        "no step was taken and the gradient was dropped, because forward_backward failed before it: "
        f"{failed_pass.result}; send the batch again"
    )
