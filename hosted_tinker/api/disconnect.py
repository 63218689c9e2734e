"""Stops work whose client has hung up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


async def run_until_disconnect(
    work: Coroutine[Any, Any, Result], receive: Receive
) -> Result | None:
    """What the work returns or raises; None, and the work is cancelled, if the client went away."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_disconnect(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait([working, watching])
    return None if working.cancelled() else working.result()


async def wait_disconnect(receive: Receive) -> None:
    """The request's body has been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass
