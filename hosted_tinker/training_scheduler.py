"""The device lane: takes the runs' requests to the trainer, which runs them one at a time.

Each run's requests run in `seq_id` order (`run_queue`); runs take turns (`training_turns`). Small
`forward_backward` requests that wait together, of one run or of many, go together and share passes.
Files are written outside the lane, so that no write holds up a pass.

What comes next is decided as late as can be, so that requests still come together and nobody waits
for what was sent too early. But the trainer shall not wait for the decision: an `optim_step` goes to it
while a pass is under way, and the next pass while a step is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hosted_tinker.errors import (
    HostedTinkerError,
    NotFoundError,
    UserError,
    WorkerFailedError,
)
from hosted_tinker.futures import Futures, Waiting
from hosted_tinker.loss_specs import check_forward_backward
from hosted_tinker.run_queue import CREATE_SEQ_ID, Job
from hosted_tinker.run_state import RunProgress, RunState, check_not_lost, make_refusal
from hosted_tinker.sent_calls import SentCall, SentCalls
from hosted_tinker.training_turns import TrainingTurns
from hosted_tinker.types import (
    CaptureState,
    ClearGradients,
    CreateModel,
    ForwardBackward,
    JointForwardBackward,
    LoadState,
    OptimStep,
    TrainingOperation,
    UnloadModel,
)
from hosted_tinker.workers.group import GroupState, WorkerGroup

logger = logging.getLogger(__name__)

JOINT_TOKENS_ON_CPU = 1024
JOINT_TOKENS_ON_GPU = 16384
"""Of requests that share passes. Where a device is busy without sharing, only the waiting grows."""


@dataclass(frozen=True, slots=True)
class WaitingCapture:
    """A copy of a run's adapter that the lane is to take before it sends another request."""

    model_id: str
    snapshot_id: str
    done: asyncio.Future[RunProgress]


class TrainingScheduler:
    """Owns every run's queue and the one task that talks to the trainer.

    Args:
        joint_tokens: most tokens of requests that share passes; None chooses by the trainer's device.
        on_new_weights: called with the run's id after each change of its weights, before the
            request that made it is answered.
        may_close: whether a run that has ended may leave memory; asked again after `wake`.
    """

    def __init__(
        self,
        trainer: WorkerGroup,
        futures: Futures,
        *,
        gap_s: float,
        joint_tokens: int | None,
        on_new_weights: Callable[[str], None],
        may_close: Callable[[str], bool],
    ) -> None:
        self._trainer = trainer
        self._futures = futures
        self._gap_s = gap_s
        self._joint_tokens = joint_tokens
        self._on_new_weights = on_new_weights
        self._may_close = may_close
        self._captures: deque[WaitingCapture] = deque()
        self._runs: dict[str, RunState] = {}
        self._turns = TrainingTurns()
        self._wake = asyncio.Event()
        self._sent = SentCalls()
        self._background: set[asyncio.Task[None]] = set()
        self._saves: set[asyncio.Task[None]] = set()

    def add_run(self, model_id: str) -> None:
        """Makes room for a run's requests; its first must create it."""
        run = self._runs[model_id] = RunState(self._gap_s)
        self._turns.add(model_id, run.queue)

    def has_run(self, model_id: str) -> bool:
        return model_id in self._runs

    def list_run_ids(self) -> list[str]:
        """Of the runs in memory, the newest last."""
        return list(self._runs)

    def get_progress(self, model_id: str) -> RunProgress:
        """Of a run in memory."""
        return self._runs[model_id].progress

    async def capture(self, model_id: str, snapshot_id: str) -> RunProgress:
        """Copies a run's adapter to host memory, before any request that the trainer has not got yet.

        Returns:
            Which weights they are.

        Raises:
            HostedTinkerError: the run is not in memory, or the trainer failed.
        """
        done: asyncio.Future[RunProgress] = asyncio.get_running_loop().create_future()
        self._captures.append(WaitingCapture(model_id, snapshot_id, done))
        self._wake.set()
        return await done

    def wake(self) -> None:
        """Makes the lane look again for something to do."""
        for run in self._runs.values():
            run.is_held = False
        self._wake.set()

    def next_seq_id(self, model_id: str) -> int:
        """For requests of old clients, which send no number."""
        return self._runs[model_id].queue.last_seq_id + 1

    def submit(self, job: Job) -> None:
        """Queues a request of a known run. A number whose turn is over fails its future."""
        run = self._runs[job.model_id]
        job.future.describe = lambda: self._describe(run, job)
        try:
            run.queue.push(job, time.monotonic())
        except UserError as error:
            self._futures.settle(job.future, error)
        self._wake.set()

    def close_run(self, model_id: str) -> None:
        """Frees the run's memory after the requests that it already has."""
        if run := self._runs.get(model_id):
            run.closing = True
            self._wake.set()

    def mark_all_lost(self) -> None:
        """The trainer was started anew: what runs had in memory is gone."""
        for run in self._runs.values():
            run.lost = True

    async def run_forever(self) -> None:
        """The lane. Ends by cancellation."""
        while True:
            # Cleared before looking, so that what comes after the look wakes the wait below.
            self._wake.clear()
            while ended := self._sent.pop_ended():
                self._settle(ended)
            if not self._sent:
                await self._run_captures()
                await self._close_runs()
            while jobs := self._take_jobs():
                await self._send(jobs)
            await self._wait_for_work()

    async def drain(self, timeout_s: float) -> None:
        """Waits for checkpoints that are being written, and drops the rest. The lane has ended."""
        if self._saves:
            await asyncio.wait(self._saves, timeout=timeout_s)
        dropped = [*self._background, *(sent.reply for sent in self._sent)]
        for future in dropped:
            future.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)

    def _take_jobs(self) -> list[Job]:
        """What goes to the trainer now, with what it has already."""
        now = time.monotonic()
        if not self._sent:
            return self._turns.take(now, self._max_joint_tokens)
        if self._is_wanted_idle:
            return []
        if self._sent.has_pass:
            return self._turns.take(now, 0, self._is_plain_step, in_turn=False)
        if len(self._sent) > 1:
            # What follows the last of these steps can still be decided.
            return []
        return self._turns.take(now, self._max_joint_tokens, self._may_follow_step)

    @property
    def _is_wanted_idle(self) -> bool:
        """Whether something waits for the trainer to have ended all it has."""
        closing = any(run.may_leave and not run.is_held for run in self._runs.values())
        return bool(self._captures) or closing or self._sent.has_others

    def _is_plain_step(self, job: Job) -> bool:
        """Whether it is a step, the run's only one under way, and nothing is known against it."""
        return (
            isinstance(job.work, OptimStep)
            and not self._runs[job.model_id].failed_passes
            and not self._sent.has_step_of(job.model_id)
        )

    def _may_follow_step(self, job: Job) -> bool:
        return isinstance(job.work, ForwardBackward) or self._is_plain_step(job)

    @property
    def _max_joint_tokens(self) -> int:
        """Beyond that, sharing gains nothing and makes the first wait for the others."""
        if self._joint_tokens is not None:
            return self._joint_tokens
        base_model = self._trainer.base_model
        on_cpu = base_model is None or base_model.device == "cpu"
        return JOINT_TOKENS_ON_CPU if on_cpu else JOINT_TOKENS_ON_GPU

    async def _wait_for_work(self) -> None:
        """Until the trainer has ended a call, or there is something new to look at."""
        now = time.monotonic()
        waits = [wait for run in self._runs.values() if (wait := run.queue.wait_s(now)) is not None]
        try:
            async with asyncio.timeout(None if self._sent else min(waits, default=None)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _run_captures(self) -> None:
        while self._captures:
            waiting = self._captures.popleft()
            run = self._runs.get(waiting.model_id)
            capture = CaptureState(waiting.model_id, waiting.snapshot_id, with_optimizer=False)
            try:
                if run is None:
                    raise NotFoundError(f"training run {waiting.model_id!r} is not in memory")
                check_not_lost(run, capture)
                await self._trainer.call(capture)
            except HostedTinkerError as error:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            else:
                if not waiting.done.done():
                    waiting.done.set_result(run.progress)

    async def _close_runs(self) -> None:
        for model_id, run in [*self._runs.items()]:
            if not run.may_leave:
                continue
            run.is_held = not self._may_close(model_id)
            if run.is_held:
                continue
            del self._runs[model_id]
            self._turns.remove(model_id)
            if self._trainer.state is GroupState.READY:
                try:
                    await self._trainer.call(UnloadModel(model_id))
                except HostedTinkerError as error:
                    logger.warning("unload failed model_id=%s error=%s", model_id, error)

    async def _send(self, jobs: Sequence[Job]) -> None:
        """Those of the jobs that can run, in one call. The others fail, each for itself."""
        able = [job for job in jobs if await self._can_run(job)]
        if not able:
            return
        reply = self._trainer.begin(self._make_call(able))
        reply.add_done_callback(lambda _: self._wake.set())
        self._sent.add(able, reply)

    async def _can_run(self, job: Job) -> bool:
        try:
            if isinstance(job.work, UserError):
                raise job.work
            # A run that is lost need not wait for the trainer, and may be lost in that time.
            check_not_lost(self._runs[job.model_id], job.work)
            base_model = await self._trainer.wait_ready()
            check_not_lost(self._runs[job.model_id], job.work)
            if isinstance(job.work, ForwardBackward):
                check_forward_backward(job.work, base_model)
            if isinstance(job.work, OptimStep):
                await self._check_passes(self._runs[job.model_id], job.work)
        except Exception as error:  # noqa: BLE001 - the lane must go on; the future says what happened
            self._fail(job, error)
            return False
        return True

    def _make_call(self, jobs: Sequence[Job]) -> TrainingOperation:
        passes = [job.work for job in jobs if isinstance(job.work, ForwardBackward)]
        if passes:
            return JointForwardBackward(passes)
        operation = jobs[0].work
        assert not isinstance(operation, UserError | ForwardBackward)
        if isinstance(operation, OptimStep) and self._sent.has_pass:
            return replace(operation, unless_pass_failed=True)
        return operation

    def _settle(self, ended: SentCall) -> None:
        """Takes the end of a call to the requests that it was made of."""
        error = ended.reply.exception()
        if error is not None:
            outputs = [error] * len(ended.jobs)
        else:
            outputs = ended.reply.result() if ended.is_pass else [ended.reply.result()]
        for job, output in zip(ended.jobs, outputs, strict=True):
            if not isinstance(output, Exception):
                self._succeed(job, output, ended.since)
            elif ended.failed_pass is not None and not self._runs[job.model_id].lost:
                self._fail(job, make_refusal(ended.failed_pass))
            else:
                self._fail(job, output)

    def _succeed(self, job: Job, output: Any, since: float) -> None:
        self._remember(job)
        log_end(job, since)
        if isinstance(job.work, CaptureState):
            spawn(self._saves, self._finish(job, self._runs[job.model_id].progress))
        else:
            spawn(self._background, self._finish(job, output))

    async def _finish(self, job: Job, output: Any) -> None:
        try:
            result = await job.finish(output)
        except Exception as error:  # noqa: BLE001 - the future says what happened
            self._fail(job, error)
        else:
            self._futures.settle(job.future, result)

    def _fail(self, job: Job, error: Exception) -> None:
        """Settles the future with the error; one that we do not know is logged with its traceback."""
        run = self._runs.get(job.model_id)
        if not isinstance(error, HostedTinkerError):
            logger.error("failed model_id=%s seq_id=%d", job.model_id, job.seq_id, exc_info=error)
            error = WorkerFailedError(f"internal error: {type(error).__name__}: {error}")
        else:
            logger.info("failed model_id=%s seq_id=%d error=%s", job.model_id, job.seq_id, error)
        # A run may be gone when one of its checkpoints can't be written.
        if run is not None and job.computes_gradient:
            self._note_failed_pass(run, job)
        if run is not None and job.seq_id == CREATE_SEQ_ID:
            run.closing = True
            self._wake.set()
        self._futures.settle(job.future, error)

    def _note_failed_pass(self, run: RunState, job: Job) -> None:
        """For the step after it, be it with the trainer already or still to come."""
        step = self._sent.find_step_after(job)
        if step is None:
            run.failed_passes.append(job.future)
        else:
            step.failed_pass = step.failed_pass or job.future

    def _remember(self, job: Job) -> None:
        """Notes what a request that succeeded changed."""
        run = self._runs[job.model_id]
        match job.work:
            case ForwardBackward(forward_only=False):
                run.last_pass_accepted_at = job.future.accepted_at
            case CreateModel():
                run.lost = False
                self._advance(run, job.model_id, 0)
            case LoadState(create=create):
                run.lost = run.lost and not create
                run.failed_passes.clear()
                self._advance(run, job.model_id, job.loaded_step)
            case OptimStep():
                self._advance(run, job.model_id, run.progress.step + 1)
            case _:
                pass

    def _advance(self, run: RunState, model_id: str, step: int) -> None:
        """Notes that the run has new weights."""
        run.progress = RunProgress(run.progress.generation + 1, step)
        self._on_new_weights(model_id)

    async def _check_passes(self, run: RunState, step: OptimStep) -> None:
        """Refuses a step whose gradient misses a part without the client's will."""
        failed = run.take_unacknowledged_failure()
        if failed is not None:
            await self._trainer.call(ClearGradients(step.model_id))
            raise make_refusal(failed)

    def _describe(self, run: RunState, job: Job) -> Waiting:
        """For a client that polls: what its request waits for."""
        if self._trainer.state is GroupState.LOADING:
            return Waiting("paused_capacity", f"the base model loads: {self._trainer.phase}")
        if waiting := self._sent.describe(job):
            return waiting
        missing = run.queue.missing_seq_id
        if missing is not None and missing < job.seq_id:
            return Waiting("active", f"waiting for seq_id {missing}, which has not arrived")
        ahead = sum(len(other.queue) for other in self._runs.values())
        return Waiting("active", f"queued; {ahead} requests wait for the trainer")


def log_end(job: Job, since: float) -> None:
    logger.info(
        "%s model_id=%s seq_id=%d ms=%.0f",
        type(job.work).__name__,
        job.model_id,
        job.seq_id,
        1000 * (time.monotonic() - since),
    )


def spawn(tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs it as one of the tasks until it ends."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
