"""Runs the samples of one request at once, and gives what they draw as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.types import NewToken, Sample, SampleOutput
from hosted_tinker.workers.group import OnTokens


class Engine(Protocol):
    """Who runs a sample."""

    async def sample(self, sample: Sample, on_tokens: OnTokens | None = None) -> SampleOutput: ...


@dataclass(frozen=True, slots=True)
class Event:
    """Something new of one prompt: tokens, or at its end everything."""

    prompt_index: int
    news: Sequence[NewToken] | SampleOutput


async def run_all(engine: Engine, samples: Sequence[Sample]) -> list[SampleOutput]:
    """All outputs. If one fails the others are ended, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.sample(sample)) for sample in samples]
    except* HostedTinkerError as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]


def first_error(errors: BaseExceptionGroup[HostedTinkerError]) -> HostedTinkerError:
    error = errors.exceptions[0]
    assert isinstance(error, HostedTinkerError)
    return error


async def stream_all(engine: Engine, samples: Sequence[Sample]) -> AsyncGenerator[Event]:
    """Events until all samples have ended. Raises the first error; closing ends all samples."""
    events: asyncio.Queue[Event | HostedTinkerError] = asyncio.Queue()

    async def run(index: int, sample: Sample) -> None:
        def note(tokens: Sequence[NewToken]) -> None:
            events.put_nowait(Event(index, tokens))

        try:
            events.put_nowait(Event(index, await engine.sample(sample, note)))
        except HostedTinkerError as error:
            events.put_nowait(error)

    tasks = [asyncio.create_task(run(index, sample)) for index, sample in enumerate(samples)]
    try:
        num_running = len(tasks)
        while num_running:
            event = await events.get()
            if isinstance(event, HostedTinkerError):
                raise event
            num_running -= isinstance(event.news, SampleOutput)
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
