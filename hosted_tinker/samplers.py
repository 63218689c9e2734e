"""Who answers a sampling request: vLLM replicas, the embedded engine, or the first with the second's help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hosted_tinker.errors import UnservableError, WorkerDiedError
from hosted_tinker.openai_api.text import TextModel
from hosted_tinker.replicas.pool import ReplicaPool
from hosted_tinker.types import (
    AdapterRef,
    BaseModelInfo,
    CancelSample,
    DescribeTokenizer,
    NewToken,
    RenderChat,
    Sample,
    SampleOutput,
)
from hosted_tinker.workers.group import GroupState, OnTokens, WorkerGroup

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""A request that was running when the engine's process died is run again, once."""
FALLBACK_FLAG = "--embedded-fallback"


class Sampler(Protocol):
    """What the API process needs of a sampler. Adapters come with absolute directories."""

    @property
    def state(self) -> GroupState: ...

    @property
    def phase(self) -> str:
        """What it is doing while it is not ready, for people to read."""
        ...

    @property
    def context_length(self) -> int | None:
        """The most tokens of one sequence; None until it is known."""
        ...

    def describe(self) -> str:
        """What it is, for people to read."""
        ...

    async def wait_ready(self) -> BaseModelInfo:
        """Raises the reason if it can't start."""
        ...

    async def sample(self, sample: Sample) -> SampleOutput:
        """Raises HostedTinkerError; cancelling the task ends the request."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a running request with an error. Unknown ids are ignored."""
        ...

    @property
    def held_adapters(self) -> Mapping[str, Path]:
        """Name -> directory of those whose files may be read again."""
        ...

    async def load(self, adapter: AdapterRef) -> None:
        """Makes an adapter ready before it is asked for. Raises UnservableError if it can't be."""
        ...

    async def unload(self, name: str) -> None:
        """Forgets an adapter that no request uses, and none will."""
        ...


class EmbeddedSampler:
    """The embedded engine. It reads an adapter's files when a request first names it."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._text_model: TextModel | None = None
        self._text_lock = asyncio.Lock()

    @property
    def state(self) -> GroupState:
        return self.group.state

    @property
    def phase(self) -> str:
        return self.group.phase

    @property
    def context_length(self) -> int | None:
        return self.group.base_model and self.group.base_model.context_length

    def describe(self) -> str:
        return "embedded engine (no vllm_gpus and no vllm_url are set)"

    async def wait_ready(self) -> BaseModelInfo:
        return await self.group.wait_ready()

    async def sample(self, sample: Sample, on_tokens: OnTokens | None = None) -> SampleOutput:
        """Runs again, once, if the process dies before it has reported a token."""
        reported = False

        def report(tokens: Sequence[NewToken]) -> None:
            nonlocal reported
            reported = True
            if on_tokens is not None:
                on_tokens(tokens)

        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self.group.call(sample, report if on_tokens else None)
            except WorkerDiedError:
                if reported or attempt == ATTEMPTS:
                    raise
            except asyncio.CancelledError:
                self.group.post(CancelSample(sample.request_id))
                raise
        raise AssertionError("unreachable")

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Token ids. Raises UserError for what the model's chat template does not take."""
        return await self.group.call(RenderChat(messages, template_kwargs))

    async def get_text_model(self) -> TextModel:
        """Raises UserError if the base model comes without a tokenizer."""
        async with self._text_lock:
            if self._text_model is None:
                described = await self.group.call(DescribeTokenizer())
                self._text_model = await asyncio.to_thread(TextModel, described)
            return self._text_model

    async def cancel(self, request_id: str) -> None:
        if self.group.state is GroupState.READY:
            await self.group.call(CancelSample(request_id))

    @property
    def held_adapters(self) -> Mapping[str, Path]:
        return {}

    async def load(self, adapter: AdapterRef) -> None:
        pass

    async def unload(self, name: str) -> None:
        pass


class VllmSampler:
    """vLLM replicas, and the embedded engine for what they can't serve, where there is one.

    Args:
        trainer: knows the base model, of which vLLM says only the context length.
    """

    def __init__(
        self, pool: ReplicaPool, trainer: WorkerGroup, fallback: EmbeddedSampler | None
    ) -> None:
        self.pool = pool
        self.fallback = fallback
        self._trainer = trainer
        self._refused: dict[str, Path] = {}

    @property
    def state(self) -> GroupState:
        """The worst of both: `failed` before `loading` before `ready`."""
        states = {self.pool.state, *([self.fallback.state] if self.fallback else [])}
        for state in (GroupState.FAILED, GroupState.LOADING):
            if state in states:
                return state
        return GroupState.READY

    @property
    def phase(self) -> str:
        if self.fallback is None or self.fallback.state is not GroupState.LOADING:
            return self.pool.phase
        return f"{self.pool.phase}; embedded engine: {self.fallback.phase}"

    @property
    def context_length(self) -> int | None:
        base, facts = self._trainer.base_model, self.pool.facts
        return min(base.context_length, facts.max_model_len) if base and facts else None

    def describe(self) -> str:
        urls = " ".join(self.pool.urls)
        return f"vLLM at {urls}" + (", embedded engine for the rest" if self.fallback else "")

    async def wait_ready(self) -> BaseModelInfo:
        # What both have said once is true while one of them is started anew.
        base = self._trainer.base_model or await self._trainer.wait_ready()
        facts = self.pool.facts or await self.pool.wait_ready()
        return replace(base, context_length=min(base.context_length, facts.max_model_len))

    async def sample(self, sample: Sample) -> SampleOutput:
        if self.is_refused(sample.adapter):
            assert self.fallback is not None
            return await self.fallback.sample(sample)
        try:
            return await self.pool.sample(sample)
        except UnservableError as error:
            if self.fallback is None:
                raise UnservableError(
                    f"{error}; or start the server with {FALLBACK_FLAG}"
                ) from error
            logger.info("embedded engine answers request_id=%s: %s", sample.request_id, error)
            return await self.fallback.sample(sample)

    def is_refused(self, adapter: AdapterRef | None) -> bool:
        """Whether vLLM refused the adapter, and the embedded engine serves it."""
        return adapter is not None and adapter.name in self._refused

    async def cancel(self, request_id: str) -> None:
        await self.pool.cancel(request_id)
        if self.fallback is not None:
            await self.fallback.cancel(request_id)

    @property
    def held_adapters(self) -> Mapping[str, Path]:
        return {**self.pool.held_adapters(), **self._refused}

    async def load(self, adapter: AdapterRef) -> None:
        """Loads it into every replica that is up; the others load it when they are asked for it."""
        try:
            await self.pool.load_everywhere(adapter)
        except UnservableError as error:
            if self.fallback is None:
                raise UnservableError(
                    f"{error}; or start the server with {FALLBACK_FLAG}"
                ) from error
            logger.warning(
                "vLLM refused an adapter, the embedded engine serves it name=%s error=%s",
                adapter.name,
                error,
            )
            self._refused[adapter.name] = adapter.directory

    async def unload(self, name: str) -> None:
        self._refused.pop(name, None)
        await self.pool.unload_everywhere(name)


def choose_sampler(
    pool: ReplicaPool | None, embedded: EmbeddedSampler | None, trainer: WorkerGroup
) -> EmbeddedSampler | VllmSampler:
    """The sampler of a server that has these parts."""
    if pool is not None:
        return VllmSampler(pool, trainer, embedded)
    assert embedded is not None
    return embedded
