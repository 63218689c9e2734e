"""The device lane: takes the runs' requests to the trainer, one at a time.

Each run's requests run in `seq_id` order (`run_queue`); runs take turns. Small `forward_backward`
requests that wait together, of one run or of many, go together and share passes. Files are written
outside the lane, so that no write holds up a pass.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from hosted_tinker.errors import (
    HostedTinkerError,
    NotFoundError,
    UserError,
    WorkerDiedError,
    WorkerFailedError,
)
from hosted_tinker.futures import Future, Futures, Waiting
from hosted_tinker.loss_specs import check_forward_backward
from hosted_tinker.run_queue import CREATE_SEQ_ID, Job, RunQueue
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
class RunProgress:
    """Where a run stands.

    Attributes:
        generation: how often its weights have changed since it came into memory.
        step: its optimizer steps, those before the checkpoint that it came from included.
    """

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class WaitingCapture:
    """A copy of a run's adapter that the lane is to take before its next request."""

    model_id: str
    snapshot_id: str
    done: asyncio.Future[RunProgress]


class Run:
    """A run's queue, and what must be remembered between its requests.

    Attributes:
        progress: of its weights.
        lost: the trainer process that held it died.
        closing: it leaves memory when its queue is empty.
        failed_passes: futures of forward_backward requests that failed since the last step.
        last_pass_accepted_at: when the newest forward_backward that succeeded since the last step
            was accepted.
    """

    def __init__(self, gap_s: float) -> None:
        self.queue = RunQueue(gap_s)
        self.progress = RunProgress(0, 0)
        self.lost = False
        self.closing = False
        self.failed_passes: list[Future] = []
        self.last_pass_accepted_at = 0


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
        self._runs: dict[str, Run] = {}
        self._turns: deque[str] = deque()
        self._wake = asyncio.Event()
        self._running: Sequence[Job] = ()
        self._running_since = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._saves: set[asyncio.Task[None]] = set()

    def add_run(self, model_id: str) -> None:
        """Makes room for a run's requests; its first must create it."""
        self._runs[model_id] = Run(self._gap_s)
        self._turns.append(model_id)

    def has_run(self, model_id: str) -> bool:
        return model_id in self._runs

    def list_run_ids(self) -> list[str]:
        """Of the runs in memory, the newest last."""
        return list(self._runs)

    def get_progress(self, model_id: str) -> RunProgress:
        """Of a run in memory."""
        return self._runs[model_id].progress

    async def capture(self, model_id: str, snapshot_id: str) -> RunProgress:
        """Copies a run's adapter to host memory before the next request runs.

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
            await self._run_captures()
            await self._close_runs()
            jobs = self._take_jobs()
            if not jobs:
                await self._wait_for_work()
            elif isinstance(jobs[0].work, ForwardBackward):
                await self._run_passes(jobs)
            else:
                await self._run_job(jobs[0])

    async def drain(self, timeout_s: float) -> None:
        """Waits for checkpoints that are being written, and drops the rest. The lane has ended."""
        if self._saves:
            await asyncio.wait(self._saves, timeout=timeout_s)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _take_jobs(self) -> list[Job]:
        """The next ready job, runs taking turns, and what can share its passes."""
        now = time.monotonic()
        for _ in range(len(self._turns)):
            model_id = self._turns[0]
            self._turns.rotate(-1)
            if job := self._runs[model_id].queue.pop_ready(now):
                return [job, *self._take_companions(job, now)]
        return []

    def _take_companions(self, first: Job, now: float) -> list[Job]:
        """Ready requests that together with the first have few enough tokens to share passes."""
        if not isinstance(first.work, ForwardBackward):
            return []
        room = self._max_joint_tokens - first.work.num_tokens
        taken: list[Job] = []
        # The first job's own run is the last in turn: the others go before its next request.
        for model_id in list(self._turns):
            queue = self._runs[model_id].queue
            while (job := queue.peek_ready(now)) and isinstance(job.work, ForwardBackward):
                if job.work.num_tokens > room:
                    break
                room -= job.work.num_tokens
                queue.pop_ready(now)
                taken.append(job)
        for model_id in dict.fromkeys(job.model_id for job in taken):
            self._turns.remove(model_id)
            self._turns.append(model_id)
        return taken

    @property
    def _max_joint_tokens(self) -> int:
        """Beyond that, sharing gains nothing and makes the first wait for the others."""
        if self._joint_tokens is not None:
            return self._joint_tokens
        base_model = self._trainer.base_model
        on_cpu = base_model is None or base_model.device == "cpu"
        return JOINT_TOKENS_ON_CPU if on_cpu else JOINT_TOKENS_ON_GPU

    async def _wait_for_work(self) -> None:
        now = time.monotonic()
        waits = [wait for run in self._runs.values() if (wait := run.queue.wait_s(now)) is not None]
        try:
            async with asyncio.timeout(min(waits, default=None)):
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
                await self._check_state(run, capture)
                await self._trainer.call(capture)
            except HostedTinkerError as error:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            else:
                if not waiting.done.done():
                    waiting.done.set_result(run.progress)

    async def _close_runs(self) -> None:
        for model_id, run in [*self._runs.items()]:
            if not run.closing or run.queue or not self._may_close(model_id):
                continue
            del self._runs[model_id]
            self._turns.remove(model_id)
            if self._trainer.state is GroupState.READY:
                try:
                    await self._trainer.call(UnloadModel(model_id))
                except HostedTinkerError as error:
                    logger.warning("unload failed model_id=%s error=%s", model_id, error)

    async def _run_passes(self, jobs: Sequence[Job]) -> None:
        """`forward_backward` requests in shared passes. Each fails for itself only."""
        self._running, self._running_since = jobs, time.monotonic()
        able: list[tuple[Job, ForwardBackward]] = []
        try:
            for job in jobs:
                assert isinstance(job.work, ForwardBackward)
                try:
                    check_forward_backward(job.work, await self._trainer.wait_ready())
                    await self._check_state(self._runs[job.model_id], job.work)
                except Exception as error:  # noqa: BLE001 - the lane must go on; the future says what happened
                    self._fail(job, error)
                else:
                    able.append((job, job.work))
            if able:
                outputs = await self._trainer.call(JointForwardBackward([work for _, work in able]))
                for (job, _), output in zip(able, outputs, strict=True):
                    await self._settle_pass(job, output)
        except Exception as error:  # noqa: BLE001 - as above
            for job, _ in able:
                if job.future.result is None:
                    self._fail(job, error)
        finally:
            self._running = ()

    async def _settle_pass(self, job: Job, output: Any) -> None:
        if isinstance(output, HostedTinkerError):
            self._fail(job, output)
        else:
            self._remember(job)
            self._log(job)
            await self._finish(job, output)

    async def _run_job(self, job: Job) -> None:
        """One request: the trainer's part here, the rest here or in the background."""
        run = self._runs[job.model_id]
        self._running, self._running_since = (job,), time.monotonic()
        try:
            if isinstance(job.work, UserError):
                raise job.work
            assert not isinstance(job.work, ForwardBackward)
            await self._check_state(run, job.work)
            output = await self._trainer.call(job.work)
        except Exception as error:  # noqa: BLE001 - the lane must go on; the future says what happened
            self._fail(job, error)
            return
        finally:
            self._running = ()
        self._remember(job)
        self._log(job)
        if isinstance(job.work, CaptureState):
            output = run.progress
        if job.in_background:
            tasks = self._saves if isinstance(job.work, CaptureState) else self._background
            spawn(tasks, self._finish(job, output))
        else:
            await self._finish(job, output)

    async def _finish(self, job: Job, output: Any) -> None:
        try:
            result = await job.finish(output)
        except Exception as error:  # noqa: BLE001 - as above
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
            run.failed_passes.append(job.future)
        if run is not None and job.seq_id == CREATE_SEQ_ID:
            run.closing = True
            self._wake.set()
        self._futures.settle(job.future, error)

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
                run.failed_passes.clear()
                self._advance(run, job.model_id, run.progress.step + 1)
            case _:
                pass

    def _advance(self, run: Run, model_id: str, step: int) -> None:
        """Notes that the run has new weights."""
        run.progress = RunProgress(run.progress.generation + 1, step)
        self._on_new_weights(model_id)

    async def _check_state(self, run: Run, operation: ForwardBackward | TrainingOperation) -> None:
        """Raises what makes the operation impossible, whatever is in it."""
        creates = isinstance(operation, CreateModel) or (
            isinstance(operation, LoadState) and operation.create
        )
        if run.lost and not creates:
            raise WorkerDiedError(
                "the trainer process was restarted and this run's unsaved state is lost; create a "
                "training client from its last checkpoint"
            )
        if isinstance(operation, OptimStep):
            await self._check_passes(run, operation)

    async def _check_passes(self, run: Run, step: OptimStep) -> None:
        """Refuses a step whose gradient misses a part without the client's will.

        A client that sends another forward_backward after it got the failure of one has decided
        to go on without it. A step that comes without that, as when both were sent together, is
        not taken.
        """
        unacknowledged = [
            future
            for future in run.failed_passes
            if future.delivered_at is None or future.delivered_at > run.last_pass_accepted_at
        ]
        run.failed_passes.clear()
        if unacknowledged:
            await self._trainer.call(ClearGradients(step.model_id))
            raise UserError(
                "no step was taken and the gradient was dropped, because forward_backward failed "
                f"before it: {unacknowledged[0].result}; send the batch again"
            )

    def _describe(self, run: Run, job: Job) -> Waiting:
        """For a client that polls: what its request waits for."""
        if self._trainer.state is GroupState.LOADING:
            return Waiting("paused_capacity", f"the base model loads: {self._trainer.phase}")
        if job in self._running:
            return Waiting("active", f"running for {time.monotonic() - self._running_since:.0f} s")
        missing = run.queue.missing_seq_id
        if missing is not None and missing < job.seq_id:
            return Waiting("active", f"waiting for seq_id {missing}, which has not arrived")
        ahead = sum(len(other.queue) for other in self._runs.values())
        return Waiting("active", f"queued; {ahead} requests wait for the trainer")

    def _log(self, job: Job) -> None:
        logger.info(
            "%s model_id=%s seq_id=%d ms=%.0f",
            type(job.work).__name__,
            job.model_id,
            job.seq_id,
            1000 * (time.monotonic() - self._running_since),
        )


def spawn(tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs it as one of the tasks until it ends."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
