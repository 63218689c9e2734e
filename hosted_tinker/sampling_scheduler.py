"""Takes sampling requests to the embedded engine, all at once: the engine batches them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from hosted_tinker.errors import (
    BusyError,
    HostedTinkerError,
    WorkerDiedError,
    WorkerFailedError,
)
from hosted_tinker.futures import Future, Futures, Waiting
from hosted_tinker.sampling.request_checks import check_sample
from hosted_tinker.types import CancelSample, Sample, SampleOutput
from hosted_tinker.workers.group import GroupState, WorkerGroup

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""A request that was running when the engine's process died is run again, once."""


class SamplingScheduler:
    """Owns the tasks of running sampling requests."""

    def __init__(self, sampler: WorkerGroup, futures: Futures, *, max_queued: int) -> None:
        self._sampler = sampler
        self._futures = futures
        self._max_queued = max_queued
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def check_room(self) -> None:
        """Raises BusyError when as many requests as allowed wait already."""
        if len(self._tasks) >= self._max_queued:
            raise BusyError(f"{len(self._tasks)} sampling requests are waiting; try again later")

    def submit(self, future: Future, sample: Sample) -> None:
        """Starts a request. Its future is settled with what comes of it."""
        future.describe = self._describe
        task = asyncio.create_task(self._run(future, sample))
        self._tasks[sample.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(sample.request_id))

    async def cancel(self, request_id: str) -> None:
        """Drops a request, wherever it is. Unknown and ended ones are ignored."""
        if request_id in self._tasks and self._sampler.state is GroupState.READY:
            await self._sampler.call(CancelSample(request_id))

    async def _run(self, future: Future, sample: Sample) -> None:
        started = time.monotonic()
        try:
            check_sample(sample, await self._sampler.wait_ready())
            output = await self._call(sample)
        except HostedTinkerError as error:
            logger.info("sample failed request_id=%s error=%s", sample.request_id, error)
            self._futures.settle(future, error)
            return
        except Exception as error:
            logger.exception("sample failed request_id=%s", sample.request_id)
            internal = WorkerFailedError(f"internal error: {type(error).__name__}: {error}")
            self._futures.settle(future, internal)
            return
        logger.info(
            "sample adapter=%s prompt_tokens=%d sampled_tokens=%d ms=%.0f",
            sample.adapter.name if sample.adapter else None,
            len(sample.prompt),
            sum(len(sequence.tokens) for sequence in output.sequences),
            1000 * (time.monotonic() - started),
        )
        self._futures.settle(future, replace(output, target_csr=sample.target_csr))

    async def _call(self, sample: Sample) -> SampleOutput:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._sampler.call(sample)
            except WorkerDiedError:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _describe(self) -> Waiting:
        if self._sampler.state is GroupState.LOADING:
            return Waiting("paused_capacity", f"the base model loads: {self._sampler.phase}")
        return Waiting("active", f"{len(self._tasks)} sampling requests run or wait")
