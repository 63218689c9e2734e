"""How far the process is ahead of its device."""

from __future__ import annotations

from collections import deque

import torch

MAX_AHEAD = 2
"""Turn points whose work may be outstanding: enough that the device does not run dry."""


class CpuQueue:
    """What is given to a CPU is computed at once."""

    def keep_short(self) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaQueue:
    """Kernels are launched and run later; without a bound a whole pass is."""

    def __init__(self) -> None:
        self._events: deque[torch.cuda.Event] = deque()

    def keep_short(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > MAX_AHEAD:
            self._events.popleft().synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize()
        self._events.clear()
