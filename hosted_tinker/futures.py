"""Futures: the promise of a result under a request id, from its acceptance until it expires.

Created idempotently: a request that is sent again, because its answer was lost, gets the first
one's future. Settled once, by the part of the server that ran the request.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.types import FutureResult

QueueState = Literal["active", "paused_capacity"]
SAMPLE_PREFIX = "sample-"
DELIVERED_TTL_S = 600.0
"""A client whose answer was lost asks again within the SDK's retries, of 300 s at most."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a client that polls too early is told."""

    queue_state: QueueState
    reason: str


@dataclass(slots=True, eq=False)
class Future:
    """A promised result.

    Attributes:
        accepted_at: tick of its creation.
        delivered_at: tick at which its result was first sent to the client.
        describe: says what it waits for, while it waits.
        result: set once.
    """

    request_id: str
    key: Hashable
    accepted_at: int
    delivered_at: int | None = None
    describe: Callable[[], Waiting] = field(default=lambda: Waiting("active", "accepted"))
    result: FutureResult | HostedTinkerError | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    expires_at: float = math.inf


class Futures:
    """All futures of the server, by request id."""

    def __init__(self, result_ttl_s: float) -> None:
        self._result_ttl_s = result_ttl_s
        self._by_id: dict[str, Future] = {}
        self._by_key: dict[Hashable, Future] = {}
        self._tick = 0

    def create(self, key: Hashable, *, sample: bool = False) -> tuple[Future, bool]:
        """The future of `key`, and whether it is new.

        The id of a sampling request is told apart so that a client can be told, after the result
        is gone, to send it again (`is_sample`).
        """
        if existing := self._by_key.get(key):
            return existing, False
        request_id = f"{SAMPLE_PREFIX if sample else ''}{uuid.uuid4().hex}"
        future = Future(request_id, key, accepted_at=self._next_tick())
        self._by_id[request_id] = self._by_key[key] = future
        return future, True

    def has(self, key: Hashable) -> bool:
        return key in self._by_key

    def get(self, request_id: str) -> Future | None:
        return self._by_id.get(request_id)

    def settle(self, future: Future, result: FutureResult | HostedTinkerError) -> None:
        """Sets the result and wakes the pollers."""
        assert future.result is None, f"future {future.request_id} settled twice"
        future.result = result
        future.expires_at = time.monotonic() + self._result_ttl_s
        future.woken.set()

    async def wait(self, future: Future, timeout_s: float) -> bool:
        """Whether the future settled in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await future.woken.wait()
        except TimeoutError:
            return False
        return future.result is not None

    def mark_delivered(self, future: Future) -> None:
        """Remembers when the client first got the result, and keeps it for a lost answer only."""
        if future.delivered_at is None:
            future.delivered_at = self._next_tick()
            future.expires_at = min(future.expires_at, time.monotonic() + DELIVERED_TTL_S)

    def _next_tick(self) -> int:
        """Orders acceptances and deliveries over the whole server."""
        self._tick += 1
        return self._tick

    def release_waiters(self) -> None:
        """Ends all waits, settled or not: the server is about to stop."""
        for future in self._by_id.values():
            future.woken.set()

    def drop_expired(self) -> None:
        """Forgets results that nobody is expected to ask for any more."""
        now = time.monotonic()
        for future in [*self._by_id.values()]:
            if future.expires_at < now:
                del self._by_id[future.request_id], self._by_key[future.key]


def is_sample(request_id: str) -> bool:
    """Whether an id, known or not, is that of a sampling request."""
    return request_id.startswith(SAMPLE_PREFIX)
