"""Which waiting requests go to the trainer together. The trainer is one that waits to be told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import numpy as np

from hosted_tinker.errors import UserError
from hosted_tinker.futures import Futures
from hosted_tinker.run_queue import Job
from hosted_tinker.training_scheduler import TrainingScheduler
from hosted_tinker.types import (
    AdamParams,
    BaseModelInfo,
    CreateModel,
    Datum,
    ForwardBackward,
    JointForwardBackward,
    LoraConfig,
    NamedResult,
    OptimStep,
)
from hosted_tinker.workers.group import GroupState

BASE = BaseModelInfo(100, 1000, 0, "Tiny", "cpu")
ROOM = 20


class HeldTrainer:
    """Takes calls, and ends each when the test says so."""

    state = GroupState.READY
    phase = "ready"
    base_model = BASE

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.released = asyncio.Semaphore(0)

    async def wait_ready(self) -> BaseModelInfo:
        return BASE

    async def call(self, operation: Any) -> Any:
        self.calls.append(operation)
        await self.released.acquire()
        if not isinstance(operation, JointForwardBackward):
            return None
        return [
            UserError("bad") if one.model_id == "d" else one.model_id
            for one in operation.operations
        ]


class Lane:
    """A scheduler with runs `a` to `d` that exist, and the trainer behind it."""

    def __init__(self) -> None:
        self.trainer = HeldTrainer()
        self.futures = Futures(result_ttl_s=60)
        self.scheduler = TrainingScheduler(
            cast(Any, self.trainer),
            self.futures,
            gap_s=10,
            joint_tokens=ROOM,
            on_new_weights=lambda _: None,
            may_close=lambda _: True,
        )
        self.results: dict[tuple[str, int], Any] = {}

    def submit(self, run: str, seq_id: int, work: Any) -> None:
        future, _ = self.futures.create((run, seq_id))

        async def finish(output: Any) -> NamedResult:
            self.results[run, seq_id] = output
            return NamedResult({})

        self.scheduler.submit(Job(run, seq_id, work, future, finish, computes_gradient=True))

    def submit_pass(self, run: str, seq_id: int, length: int, **options: Any) -> None:
        tokens = np.arange(length)
        inputs = {"target_tokens": tokens, "weights": np.ones(length, np.float32)}
        work = ForwardBackward(run, [Datum(tokens, inputs)], "cross_entropy", **options)
        self.submit(run, seq_id, work)

    async def start(self) -> None:
        """Creates the runs, and holds the lane in the last of their requests."""
        for run in "abcd":
            self.scheduler.add_run(run)
            self.submit(run, 0, CreateModel(run, LoraConfig(lora_rank=1, seed=0)))
        self.lane = asyncio.create_task(self.scheduler.run_forever())
        await self.go_on(3)
        self.trainer.calls.clear()

    async def go_on(self, calls: int) -> None:
        for _ in range(calls):
            self.trainer.released.release()
            await asyncio.sleep(0.01)

    @property
    def groups(self) -> list[list[tuple[str, int]]]:
        """Run and tokens of the passes that went together."""
        return [
            [(one.model_id, one.num_tokens) for one in call.operations]
            for call in self.trainer.calls
            if isinstance(call, JointForwardBackward)
        ]


def run_lane(test: Callable[[Lane], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        lane = Lane()
        await lane.start()
        try:
            await test(lane)
        finally:
            lane.lane.cancel()
            await asyncio.gather(lane.lane, return_exceptions=True)

    asyncio.run(run())


def check_groups(
    passes: Sequence[tuple[str, int, int]], expected: Sequence[Sequence[tuple[str, int]]]
) -> None:
    async def test(lane: Lane) -> None:
        for run, seq_id, length in passes:
            lane.submit_pass(run, seq_id, length)
        await lane.go_on(10)
        assert lane.groups == expected
        assert lane.results.keys() >= {(run, seq_id) for run, seq_id, _ in passes}

    run_lane(test)


def test_small_requests_of_many_runs_go_together() -> None:
    check_groups(
        [("a", 1, 5), ("b", 1, 4), ("c", 1, 6)],
        [[("a", 5), ("b", 4), ("c", 6)]],
    )


def test_a_request_over_the_limit_goes_alone_and_takes_none_along() -> None:
    check_groups(
        [("a", 1, 50), ("b", 1, 4), ("c", 1, 6)],
        [[("a", 50)], [("b", 4), ("c", 6)]],
    )


def test_what_does_not_fit_waits_for_its_turn() -> None:
    check_groups(
        [("a", 1, 12), ("b", 1, 12), ("c", 1, 5)],
        [[("a", 12), ("c", 5)], [("b", 12)]],
    )


def test_requests_of_one_run_go_together_up_to_its_step() -> None:
    async def test(lane: Lane) -> None:
        lane.submit_pass("a", 1, 3)
        lane.submit_pass("a", 2, 4)
        lane.submit("a", 3, OptimStep("a", AdamParams()))
        lane.submit_pass("a", 4, 5)
        lane.submit_pass("b", 1, 6)
        await lane.go_on(10)
        assert lane.groups == [[("a", 3), ("b", 6), ("a", 4)], [("a", 5)]]
        kinds = [type(call) for call in lane.trainer.calls]
        assert kinds == [JointForwardBackward, OptimStep, JointForwardBackward]

    run_lane(test)


def test_one_that_fails_fails_for_itself() -> None:
    async def test(lane: Lane) -> None:
        lane.submit_pass("a", 1, 3, loss_fn_config={"no": 1.0})
        lane.submit_pass("b", 1, 1)
        lane.submit_pass("c", 1, 2)
        lane.submit_pass("d", 1, 4)
        await lane.go_on(10)
        assert lane.groups == [[("b", 1), ("c", 2), ("d", 4)]]
        assert {key: one for key, one in lane.results.items() if key[1]} == {
            ("b", 1): "b",
            ("c", 1): "c",
        }
        for run, message in (("a", "'no'"), ("d", "bad")):
            future, is_new = lane.futures.create((run, 1))
            assert not is_new
            assert message in str(future.result)
            assert isinstance(future.result, UserError)

    run_lane(test)
