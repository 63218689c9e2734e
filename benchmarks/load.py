"""Sends streamed completions to an OpenAI endpoint and times their tokens."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds from when it was sent."""

    first_token_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send.

    Attributes:
        starts: when each may start at the earliest, seconds from the first.
        concurrency: how many are sent at once.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    concurrency: int
    starts: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a load."""

    timings: Sequence[Timing]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(timing.num_tokens for timing in self.timings) / self.duration_s

    def summarize(self) -> dict[str, float]:
        """Throughput, and times in milliseconds."""
        first = [timing.first_token_s for timing in self.timings]
        whole = [timing.end_s for timing in self.timings]
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "ttft_p50_ms": round(1000 * statistics.median(first)),
            "ttft_p99_ms": round(1000 * quantile(first, 0.99)),
            "latency_p50_ms": round(1000 * statistics.median(whole)),
            "latency_p99_ms": round(1000 * quantile(whole, 0.99)),
        }


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that is not below that fraction of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def make_prompts(count: int, length: int, seed: int, vocab_size: int = 40_000) -> list[list[int]]:
    """Random tokens: no two prompts share a prefix that a cache could hold."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, vocab_size) for _ in range(length)] for _ in range(count)]


def send_load(url: str, load: Load) -> Measured:
    """Runs the load to its end. Every request generates exactly its `max_tokens`."""
    return asyncio.run(_send_load(url, load))


async def _send_load(url: str, load: Load) -> Measured:
    slots = asyncio.Semaphore(load.concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begin = time.perf_counter()

        async def send(index: int) -> Timing:
            if load.starts is not None:
                await asyncio.sleep(begin + load.starts[index] - time.perf_counter())
            arrived = time.perf_counter()
            async with slots:
                sent = time.perf_counter() if load.starts is None else arrived
                return await _complete(
                    session, url, load.model, load.prompts[index], load.max_tokens[index], sent
                )

        timings = await asyncio.gather(*(send(index) for index in range(len(load.prompts))))
        return Measured(timings, time.perf_counter() - begin)


async def _complete(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    sent: float,
) -> Timing:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    first = None
    num_tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if first is None and line.startswith(b"data: "):
                first = time.perf_counter()
            if b'"usage":{' in line and b'"completion_tokens":' in line:
                num_tokens = int(line.split(b'"completion_tokens":')[1].split(b",")[0].strip(b"}"))
    end = time.perf_counter()
    if first is None or num_tokens != max_tokens:
        raise RuntimeError(f"{url} generated {num_tokens} of {max_tokens} tokens")
    return Timing(first - sent, end - sent, num_tokens)
