"""The loop that trains and samples in turns, on a clock of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hosted_tinker.modeling.device_queue import CpuQueue
from hosted_tinker.types import AdamParams, OptimStep, Sample, SamplingParams
from hosted_tinker.workers import shared_device
from hosted_tinker.workers.messages import Call
from hosted_tinker.workers.shared_device import SharedDevice
from hosted_tinker.workers.turns import Turns

LAYER_S = 1.0
STEP_S = 0.1


class Over(Exception):
    """Ends the loop."""


class World:
    """Pipe, lanes and clock. Calls arrive at given times; `events` say what the device did."""

    def __init__(self, arrivals: list[tuple[float, Any]], layers: int, steps: int) -> None:
        self.now = 0.0
        self.events: list[tuple[str, float]] = []
        self.arrivals = arrivals
        self.layers, self.steps = layers, steps
        self.steps_left = 0
        self.memory_until = float("inf")
        self.device: SharedDevice

    def perf_counter(self) -> float:
        return self.now

    def take(self, *, block: bool) -> list[Call]:
        if block:
            if not self.arrivals:
                raise Over
            self.now = max(self.now, self.arrivals[0][0])
        calls = [Call(0, work) for when, work in self.arrivals if when <= self.now]
        del self.arrivals[: len(calls)]
        return calls

    def run(self, call: Call) -> None:
        for _ in range(self.layers):
            self.device.turn()
            self.now += LAYER_S
            self.events.append(("layer", self.now))
        self.events.append(("trained", self.now))

    def accept(self, call: Call) -> None:
        self.steps_left += self.steps

    @property
    def has_work(self) -> bool:
        return self.steps_left > 0

    def step(self, *, can_wait: bool) -> bool:
        self.now += STEP_S
        if can_wait and self.now > self.memory_until:
            self.events.append(("no memory", self.now))
            return False
        self.steps_left -= 1
        self.events.append(("step", self.now))
        return True

    def send(self, message: object) -> None:
        raise AssertionError(message)


def run(world: World, share: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(shared_device.time, "perf_counter", world.perf_counter)
    lane: Any = world
    world.device = SharedDevice(lane, Turns(share))
    with pytest.raises(Over):
        world.device.run_forever(lane, lane, CpuQueue())
    return [name for name, _ in world.events]


def make_step() -> OptimStep:
    return OptimStep("run", AdamParams(1e-3))


def make_sample() -> Sample:
    return Sample("s", None, np.ones(1, np.int64), SamplingParams())


def test_a_sample_comes_in_the_midst_of_a_long_pass_and_does_not_stall_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That nothing was sampled for 30 s gives a long generation no right to 30 s now."""
    world = World([(0.0, make_step()), (30.5, make_sample())], layers=60, steps=100)
    events = run(world, 0.5, monkeypatch)
    first = events.index("step")
    assert events[:first].count("layer") == 31
    between = events[first:].index("layer")
    assert between <= 2 * LAYER_S / STEP_S
    assert events.index("trained") > len(events) - 2
    assert events.count("step") == 100


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_both_get_their_shares(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([(0.0, make_step()), (0.0, make_sample())], layers=100, steps=10_000)
    run(world, share, monkeypatch)
    ended = next(when for name, when in world.events if name == "trained")
    sampled = STEP_S * sum(name == "step" and when < ended for name, when in world.events)
    assert sampled / ended == pytest.approx(share, abs=0.02)


def test_without_memory_beside_a_pass_the_engine_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([(0.0, make_step()), (2.5, make_sample())], layers=10, steps=5)
    world.memory_until = 0.0
    events = run(world, 0.5, monkeypatch)
    assert events.count("no memory") == 1
    assert events[-6:] == ["trained", *["step"] * 5]
