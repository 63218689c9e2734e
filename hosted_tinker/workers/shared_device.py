"""Training and sampling in one process, on one base model and one device, in turns.

A pass of training stops between layers to let the engine have its steps, so that a sample waits for
a layer and not for a batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from hosted_tinker.types import TrainingOperation
from hosted_tinker.workers.messages import Call
from hosted_tinker.workers.pipe import Pipe
from hosted_tinker.workers.sampling_lane import SamplingLane
from hosted_tinker.workers.training_lane import TrainingLane
from hosted_tinker.workers.turns import Turns


class SharedDevice:
    """The loop of the process. `turn` is for the backend to call; it does nothing before the loop."""

    def __init__(self, pipe: Pipe, turns: Turns) -> None:
        self._pipe = pipe
        self._turns = turns
        self._training: TrainingLane
        self._sampling: SamplingLane
        self._finish_kernels: Callable[[], None]
        self._waiting: deque[Call] = deque()
        self._is_training = False
        self._since: float | None = None

    def run_forever(
        self, training: TrainingLane, sampling: SamplingLane, finish_kernels: Callable[[], None]
    ) -> None:
        """`finish_kernels` waits until the device has computed what it was given."""
        self._training, self._sampling = training, sampling
        self._finish_kernels = finish_kernels
        while True:
            self._take_calls(block=not self._waiting and not sampling.has_work)
            if self._waiting and not (sampling.has_work and self._turns.sampling_is_due):
                self._train(self._waiting.popleft())
            elif sampling.has_work:
                self._step()

    def turn(self) -> None:
        """Called in the midst of training. Runs the steps of the engine that are due."""
        if self._since is None:
            return
        self._take_calls(block=False)
        if not self._sampling.has_work:
            return
        self._stop_clock()
        while self._sampling.has_work and self._turns.sampling_is_due:
            self._step()
            self._take_calls(block=False)
        self._since = time.perf_counter()

    def _train(self, call: Call) -> None:
        self._is_training = True
        self._since = time.perf_counter()
        self._training.run(call)
        self._stop_clock()
        self._is_training = False

    def _stop_clock(self) -> None:
        """Of training. While it stands, the layers that the engine computes are no turn points."""
        assert self._since is not None
        self._finish_kernels()
        self._turns.charge("training", time.perf_counter() - self._since)
        self._since = None

    def _step(self) -> None:
        start = time.perf_counter()
        self._sampling.step()
        self._turns.charge("sampling", time.perf_counter() - start)

    def _take_calls(self, *, block: bool) -> None:
        for call in self._pipe.take(block=block):
            if isinstance(call.operation, TrainingOperation):
                if not self._waiting and not self._is_training:
                    self._turns.begin("training")
                self._waiting.append(call)
                continue
            if not self._sampling.has_work:
                self._turns.begin("sampling")
            self._sampling.accept(call)
