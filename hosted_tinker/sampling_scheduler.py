"""Takes sampling requests to the sampler, all at once: the engines batch them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator
from dataclasses import replace

from hosted_tinker.adapter_holds import AdapterHolds
from hosted_tinker.errors import BusyError, HostedTinkerError, WorkerFailedError
from hosted_tinker.futures import Future, Futures, Waiting
from hosted_tinker.samplers import Sampler
from hosted_tinker.sampling.request_checks import check_sample
from hosted_tinker.types import Sample
from hosted_tinker.workers.group import GroupState

logger = logging.getLogger(__name__)


class SamplingScheduler:
    """Owns the tasks of running sampling requests."""

    def __init__(
        self, sampler: Sampler, futures: Futures, holds: AdapterHolds, *, max_queued: int
    ) -> None:
        self._sampler = sampler
        self._futures = futures
        self._holds = holds
        self._max_queued = max_queued
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_elsewhere = 0

    def check_room(self) -> None:
        """Raises BusyError when as many requests as allowed wait already."""
        if self._num_requests >= self._max_queued:
            raise BusyError(f"{self._num_requests} sampling requests are waiting; try again later")

    @contextlib.contextmanager
    def take_room(self) -> Generator[None]:
        """Counts a request that is answered elsewhere. Raises BusyError as `check_room` does."""
        self.check_room()
        self._num_elsewhere += 1
        try:
            yield
        finally:
            self._num_elsewhere -= 1

    @property
    def _num_requests(self) -> int:
        return len(self._tasks) + self._num_elsewhere

    def submit(self, future: Future, sample: Sample) -> None:
        """Starts a request. Its future is settled with what comes of it."""
        future.describe = self._describe
        task = asyncio.create_task(self._run(future, sample))
        self._tasks[sample.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(sample.request_id))

    async def cancel(self, request_id: str) -> None:
        """Drops a request, wherever it is. Unknown and ended ones are ignored."""
        if request_id in self._tasks:
            await self._sampler.cancel(request_id)

    async def _run(self, future: Future, sample: Sample) -> None:
        started = time.monotonic()
        try:
            with self._holds.hold(sample.adapter):
                check_sample(sample, await self._sampler.wait_ready())
                output = await self._sampler.sample(sample)
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

    def _describe(self) -> Waiting:
        if self._sampler.state is GroupState.LOADING:
            return Waiting("paused_capacity", f"the sampler starts: {self._sampler.phase}")
        return Waiting("active", f"{self._num_requests} sampling requests run or wait")
