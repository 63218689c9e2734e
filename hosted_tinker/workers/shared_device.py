"""Training and sampling in one process, on one base model and one device, in turns.

A pass of training stops between layers to let the engine have its steps, so that a sample waits for
a layer and not for a batch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Protocol

from hosted_tinker.types import TrainingOperation
from hosted_tinker.workers.messages import Call, LoadFailed
from hosted_tinker.workers.pipe import Pipe
from hosted_tinker.workers.replies import describe_failure
from hosted_tinker.workers.sampling_lane import SamplingLane
from hosted_tinker.workers.training_lane import TrainingLane
from hosted_tinker.workers.turns import Turns


class DeviceQueue(Protocol):
    """What the device has been given and has not computed yet."""

    def keep_short(self) -> None:
        """Called at each turn point. Waits for the work before the last few of them."""
        ...

    def finish(self) -> None:
        """Waits until all of it is computed."""
        ...


class SharedDevice:
    """The loop of the process. `turn` is for the backend to call; it does nothing before the loop.

    One of training and sampling runs at a time, but not always on one thread: autograd has its own
    for a GPU's backward pass.
    """

    def __init__(self, pipe: Pipe, turns: Turns) -> None:
        self._pipe = pipe
        self._turns = turns
        self._training: TrainingLane
        self._sampling: SamplingLane
        self._queue: DeviceQueue
        self._waiting: deque[Call] = deque()
        self._is_training = False
        self._training_since: float | None = None
        self._lacks_memory = False

    def run_forever(
        self, training: TrainingLane, sampling: SamplingLane, queue: DeviceQueue
    ) -> None:
        self._training, self._sampling, self._queue = training, sampling, queue
        while True:
            self._take_calls(block=not self._waiting and not sampling.has_work)
            if self._waiting and not (sampling.has_work and self._turns.sampling_is_due):
                self._train(self._waiting.popleft())
            elif sampling.has_work:
                self._step()

    def turn(self) -> None:
        """Called in the midst of training. Runs the steps of the engine that are due."""
        if self._training_since is None:
            return
        self._queue.keep_short()
        self._charge_training()
        # The layers that the engine computes are no turn points.
        self._training_since = None
        try:
            self._sample()
        except Exception as error:  # noqa: BLE001 - the pass has no part in it; the process ends
            self._pipe.send(LoadFailed(describe_failure(error)))
            os._exit(1)
        self._training_since = time.perf_counter()

    def _sample(self) -> None:
        self._take_calls(block=False)
        if not self._sampling_could_run:
            return
        begin = time.perf_counter()
        self._queue.finish()
        self._turns.charge("training", time.perf_counter() - begin)
        while self._sampling_could_run:
            self._step()
            self._take_calls(block=False)

    @property
    def _sampling_could_run(self) -> bool:
        return self._sampling.has_work and self._turns.sampling_is_due and not self._lacks_memory

    def _train(self, call: Call) -> None:
        self._is_training = True
        self._training_since = time.perf_counter()
        self._training.run(call)
        self._queue.finish()
        self._charge_training()
        self._training_since = None
        self._is_training = self._lacks_memory = False

    def _charge_training(self) -> None:
        assert self._training_since is not None
        now = time.perf_counter()
        self._turns.charge("training", now - self._training_since)
        self._training_since = now

    def _step(self) -> None:
        """One that lacks memory beside a pass of training waits for the end of that."""
        start = time.perf_counter()
        self._lacks_memory = not self._sampling.step(can_wait=self._is_training)
        self._queue.finish()
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
