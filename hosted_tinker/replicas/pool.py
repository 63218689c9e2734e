"""The replicas as one sampler: chooses, waits, sends again, and keeps adapters in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from hosted_tinker.errors import SamplerDownError, UnservableError, UserError
from hosted_tinker.replicas.affinity import PrefixAffinity
from hosted_tinker.replicas.engine_client import ReplicaGoneError
from hosted_tinker.replicas.replica import Replica
from hosted_tinker.replicas.sample_requests import (
    NO_UNEMBEDDING,
    EngineFacts,
    adapts_unembedding,
    describe_unservable,
    split_scoring,
)
from hosted_tinker.types import AdapterRef, Sample, SampleOutput
from hosted_tinker.workers.group import GroupState

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""A request whose replica died is sent again; one that is sent in vain this often may be the cause."""


class ReplicaPool:
    """Replicas that serve the same base model. Requests may come before `start`: they wait."""

    def __init__(self, recovery_timeout_s: float) -> None:
        self._recovery_timeout_s = recovery_timeout_s
        self._replicas: Sequence[Replica] = ()
        self._affinity = PrefixAffinity()
        self._started = asyncio.Event()
        self._running: dict[str, asyncio.Task[SampleOutput]] = {}
        self._cancelled: set[str] = set()

    def start(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        for replica in replicas:
            replica.start()
        self._started.set()

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self._replicas))

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self._replicas]

    @property
    def state(self) -> GroupState:
        """Ready as soon as one replica is, failed when all have."""
        states = {replica.state for replica in self._replicas}
        if GroupState.READY in states:
            return GroupState.READY
        return GroupState.FAILED if states == {GroupState.FAILED} else GroupState.LOADING

    @property
    def phase(self) -> str:
        """Of the replicas that are not ready."""
        waiting = [one.phase for one in self._replicas if one.state is not GroupState.READY]
        return "; ".join(waiting) or ("ready" if self._replicas else "starting")

    @property
    def facts(self) -> EngineFacts | None:
        """What holds for every replica that has been ready; None before the first is."""
        facts = [one.facts for one in self._replicas if one.facts is not None]
        if not facts:
            return None
        return EngineFacts(
            min(one.max_model_len for one in facts),
            all(one.scales_logprobs for one in facts),
            any(one.on_cpu for one in facts),
        )

    async def wait_ready(self) -> EngineFacts:
        """The facts, once a replica is ready.

        Raises:
            HostedTinkerError: all replicas have failed for good; the reason of the first.
        """
        await self._started.wait()
        while True:
            if (facts := self.facts) is not None and self.state is GroupState.READY:
                return facts
            await self._wait_change()

    async def sample(self, sample: Sample) -> SampleOutput:
        """Raises UnservableError, UserError for what vLLM refuses, SamplerDownError."""
        task = asyncio.create_task(self._sample(sample))
        self._running[sample.request_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            if sample.request_id in self._cancelled:
                raise UserError("cancelled") from None
            raise
        finally:
            self._cancelled.discard(sample.request_id)
            del self._running[sample.request_id]

    async def cancel(self, request_id: str) -> None:
        """Ends a running sample with an error; vLLM drops it. Unknown ids are ignored."""
        if task := self._running.get(request_id):
            self._cancelled.add(request_id)
            task.cancel()

    @contextlib.asynccontextmanager
    async def lease(
        self, adapter: AdapterRef | None, prefix: bytes, *, scores_prompt: bool = False
    ) -> AsyncGenerator[Replica]:
        """A replica that has the adapter, and keeps it while the context is open.

        Args:
            prefix: bytes that begin alike where prompts do.
            scores_prompt: the request asks for log-probabilities of its prompt.

        Raises:
            UnservableError: vLLM refuses the adapter, or can't score prompts with it.
            SamplerDownError: no replica is ready in time.
        """
        if scores_prompt and adapts_unembedding(adapter):
            raise UnservableError(NO_UNEMBEDDING)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(ATTEMPTS):
                replica = await self._choose(adapter, prefix)
                using = replica.use(adapter, scores_prompt=scores_prompt)
                try:
                    await stack.enter_async_context(using)
                except ReplicaGoneError as error:
                    logger.info("another replica is asked url=%s: %s", replica.url, error)
                else:
                    yield replica
                    return
            raise SamplerDownError(f"the sampler died {ATTEMPTS} times before the request began")

    async def load_everywhere(self, adapter: AdapterRef) -> None:
        """Loads it into every replica that is ready; the others load it when asked for it.

        Raises:
            UnservableError: a replica refuses it.
            UserError: its files can't be read.
        """
        await asyncio.gather(*(self._load(replica, adapter) for replica in self._ready))

    async def unload_everywhere(self, name: str) -> None:
        """Returns when no replica that answers holds it; the others drop it when they are back."""
        await asyncio.gather(*(self._unload(replica, name) for replica in self._replicas))

    def held_adapters(self) -> dict[str, Path]:
        """Name -> directory of what any replica has, or is about to have."""
        return {
            name: directory
            for replica in self._replicas
            for name, directory in replica.adapters.directories.items()
        }

    @property
    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.state is GroupState.READY]

    async def _sample(self, sample: Sample) -> SampleOutput:
        if reason := describe_unservable(sample, await self._wait_ready_in_time()):
            raise UnservableError(reason)
        scoring, generating = split_scoring(sample)
        scored = await self._run(scoring, scores_prompt=True) if scoring else None
        output = await self._run(generating, scores_prompt=False) if generating else scored
        assert output is not None
        return output if scored is None else replace(scored, sequences=output.sequences)

    async def _run(self, sample: Sample, *, scores_prompt: bool) -> SampleOutput:
        prefix = sample.prompt.tobytes()
        for _ in range(ATTEMPTS):
            async with self.lease(sample.adapter, prefix, scores_prompt=scores_prompt) as replica:
                try:
                    return await replica.sample(sample)
                except ReplicaGoneError as error:
                    logger.info("sample is sent again request_id=%s: %s", sample.request_id, error)
        raise SamplerDownError(
            f"the sampler died {ATTEMPTS} times while it had this request; send it again later"
        )

    async def _choose(self, adapter: AdapterRef | None, prefix: bytes) -> Replica:
        await self._wait_ready_in_time()
        loads = {
            index: replica.num_requests
            for index, replica in enumerate(self._replicas)
            if replica.state is GroupState.READY
        }
        key = adapter.name if adapter else ""
        return self._replicas[self._affinity.choose(key, prefix, loads)]

    async def _wait_ready_in_time(self) -> EngineFacts:
        try:
            async with asyncio.timeout(self._recovery_timeout_s):
                return await self.wait_ready()
        except TimeoutError as error:
            raise SamplerDownError(
                f"no sampler was ready within {self._recovery_timeout_s:.0f} s: {self.phase}"
            ) from error

    async def _wait_change(self) -> None:
        """Raises the first replica's failure if all have failed."""
        if self.state is GroupState.FAILED:
            failure = self._replicas[0].failure
            assert failure is not None
            raise failure.with_traceback(None)
        waits = [asyncio.create_task(replica.changed.wait()) for replica in self._replicas]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _load(self, replica: Replica, adapter: AdapterRef) -> None:
        try:
            await replica.load(adapter)
        except ReplicaGoneError as error:
            logger.info("adapter not loaded now name=%s: %s", adapter.name, error)

    async def _unload(self, replica: Replica, name: str) -> None:
        try:
            await replica.unload(name)
        except ReplicaGoneError as error:
            logger.info("adapter not unloaded now name=%s: %s", name, error)
