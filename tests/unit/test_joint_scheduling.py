"""Which waiting requests go to the trainer, together or ahead. The trainer waits to be told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import numpy as np

from hosted_tinker.errors import UserError, WorkerDiedError
from hosted_tinker.futures import Futures
from hosted_tinker.run_queue import Job
from hosted_tinker.training_scheduler import TrainingScheduler
from hosted_tinker.types import (
    AdamParams,
    BaseModelInfo,
    CaptureState,
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


async def let_the_lane_run() -> None:
    """Until it waits: it has no other thread and no timer here."""
    for _ in range(50):
        await asyncio.sleep(0)


class HeldTrainer:
    """Takes calls, and ends the oldest when the test says so. Passes of run `d` fail."""

    state = GroupState.READY
    phase = "ready"
    base_model = BASE

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.replies: deque[tuple[Any, asyncio.Future[Any]]] = deque()

    async def wait_ready(self) -> BaseModelInfo:
        return BASE

    def begin(self, operation: Any) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls.append(operation)
        self.replies.append((operation, reply))
        return reply

    async def call(self, operation: Any) -> Any:
        return await self.begin(operation)

    def die(self) -> None:
        for _, reply in self.replies:
            reply.set_exception(WorkerDiedError("the trainer died"))
        self.replies.clear()

    def end_oldest(self) -> None:
        if not self.replies:
            return
        operation, reply = self.replies.popleft()
        if isinstance(operation, OptimStep) and operation.model_id == "d":
            reply.set_exception(UserError("the trainer's words"))
        elif isinstance(operation, JointForwardBackward):
            runs = [one.model_id for one in operation.operations]
            reply.set_result([UserError("bad") if run == "d" else run for run in runs])
        else:
            reply.set_result(None)


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
            may_close=lambda _: self.may_close,
        )
        self.results: dict[tuple[str, int], Any] = {}
        self.may_close = True

    def submit(self, run: str, seq_id: int, work: Any) -> None:
        future, _ = self.futures.create((run, seq_id))

        async def finish(output: Any) -> NamedResult:
            self.results[run, seq_id] = output
            return NamedResult({})

        has_gradient = isinstance(work, ForwardBackward) and not work.forward_only
        job = Job(run, seq_id, work, future, finish, computes_gradient=has_gradient)
        self.scheduler.submit(job)

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
            await let_the_lane_run()
            self.trainer.end_oldest()
        await let_the_lane_run()

    def submit_step(self, run: str, seq_id: int) -> None:
        self.submit(run, seq_id, OptimStep(run, AdamParams()))

    async def look_at_calls(self) -> list[str]:
        """What the trainer was given: a pass's runs, else the kind and the run."""
        await let_the_lane_run()
        return [
            "".join(one.model_id for one in call.operations)
            if isinstance(call, JointForwardBackward)
            else f"{type(call).__name__} {call.model_id}"
            for call in self.trainer.calls
        ]

    def get_result(self, run: str, seq_id: int) -> Any:
        future, is_new = self.futures.create((run, seq_id))
        assert not is_new
        return future.result

    @property
    def groups(self) -> list[list[tuple[str, int]]]:
        """Run and tokens of the passes that went together."""
        return [
            [(one.model_id, one.num_tokens) for one in call.operations]
            for call in self.trainer.calls
            if isinstance(call, JointForwardBackward)
        ]


def run_lane(test: Callable[[Lane], Coroutine[Any, Any, None]], *, ends: bool = False) -> None:
    async def run() -> None:
        lane = Lane()
        await lane.start()
        try:
            await test(lane)
            assert lane.lane.done() == ends
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
        lane.submit_step("a", 3)
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
            result = lane.get_result(run, 1)
            assert message in str(result)
            assert isinstance(result, UserError)

    run_lane(test)


def test_steps_go_to_the_trainer_while_a_pass_is_under_way_and_nothing_else_does() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_pass("a", 1, 30)
        assert await lane.look_at_calls() == ["a"]
        lane.submit_pass("b", 1, 5)
        lane.submit("c", 1, CaptureState("c", "snapshot", with_optimizer=True))
        lane.submit_step("a", 2)
        assert await lane.look_at_calls() == ["a", "OptimStep a"]
        assert lane.trainer.calls[-1].unless_pass_failed
        await lane.go_on(1)
        assert await lane.look_at_calls() == ["a", "OptimStep a", "b"]
        lane.submit_step("b", 2)
        assert (await lane.look_at_calls())[3:] == ["OptimStep b"]
        await lane.go_on(9)
        assert (await lane.look_at_calls())[4:] == ["CaptureState c"]

    run_lane(test)


def test_a_pass_goes_behind_a_step_in_its_turn() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_step("a", 1)
        assert await lane.look_at_calls() == ["OptimStep a"]
        assert not lane.trainer.calls[-1].unless_pass_failed
        lane.submit("b", 1, CaptureState("b", "snapshot", with_optimizer=True))
        lane.submit_pass("c", 1, 5)
        assert await lane.look_at_calls() == ["OptimStep a"]
        await lane.go_on(1)
        assert (await lane.look_at_calls())[1:] == ["CaptureState b"]
        await lane.go_on(1)
        assert (await lane.look_at_calls())[2:] == ["c"]

    run_lane(test)


def test_a_copy_of_a_runs_weights_is_not_kept_waiting_by_what_goes_ahead() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_step("a", 1)
        await lane.look_at_calls()
        copied = asyncio.create_task(lane.scheduler.capture("a", "snapshot"))
        await asyncio.sleep(0)
        lane.submit_pass("b", 1, 5)
        assert await lane.look_at_calls() == ["OptimStep a"]
        await lane.go_on(2)
        assert (await copied).step == 1
        assert (await lane.look_at_calls())[1:] == ["CaptureState a", "b"]

    run_lane(test)


def test_a_failed_pass_refuses_the_step_after_it_and_only_that() -> None:
    """Also where the step was with the trainer before the pass failed, and the next pass before it."""

    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_pass("d", 1, 4)
        await lane.look_at_calls()
        lane.submit_step("d", 2)
        lane.submit_pass("d", 3, 4, loss_fn_config={"no": 1.0})
        lane.submit_step("d", 4)
        await lane.go_on(9)
        assert await lane.look_at_calls() == ["d", "OptimStep d", "ClearGradients d"]
        for seq_id, reason in ((2, "failed before it: bad;"), (4, "'no'")):
            refusal = lane.get_result("d", seq_id)
            assert isinstance(refusal, UserError)
            assert "no step was taken" in str(refusal)
            assert reason in str(refusal)

    run_lane(test)


def test_a_pass_that_fails_behind_a_step_does_not_spoil_that() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_step("a", 1)
        await lane.look_at_calls()
        lane.submit_pass("a", 2, 4, loss_fn_config={"no": 1.0})
        lane.submit_step("a", 3)
        await lane.go_on(9)
        assert isinstance(lane.get_result("a", 1), NamedResult)
        assert "'no'" in str(lane.get_result("a", 3))

    run_lane(test)


def test_the_run_that_waited_longest_has_its_turn_first() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_pass("b", 1, 30)
        await lane.go_on(1)
        lane.submit_pass("a", 1, 30)
        await lane.look_at_calls()
        lane.submit_pass("b", 2, 30)
        lane.submit_pass("c", 1, 30)
        await lane.go_on(5)
        assert await lane.look_at_calls() == ["b", "a", "c", "b"]

    run_lane(test)


def test_small_passes_still_come_together_after_steps() -> None:
    """What goes behind the last of the steps is decided when that is all that is left."""

    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        for run in "abc":
            lane.submit_pass(run, 1, 5)
        await lane.look_at_calls()
        for run in "abc":
            lane.submit_step(run, 2)
        await lane.go_on(1)
        assert (await lane.look_at_calls())[1:] == ["OptimStep a", "OptimStep b", "OptimStep c"]
        lane.submit_pass("a", 3, 5)
        await lane.go_on(1)
        lane.submit_pass("b", 3, 5)
        assert len(await lane.look_at_calls()) == 4
        await lane.go_on(1)
        assert (await lane.look_at_calls())[4:] == ["ab"]

    run_lane(test)


def test_one_step_of_a_run_goes_ahead_at_a_time() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_pass("a", 1, 30)
        await lane.look_at_calls()
        for seq_id in (2, 3, 4):
            lane.submit_step("a", seq_id)
        assert await lane.look_at_calls() == ["a", "OptimStep a"]

    run_lane(test)


def test_a_run_that_ends_and_a_new_one_have_their_turn_beside_a_busy_one() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        for number in range(8):
            lane.submit_pass("a", 2 * number + 1, 30)
            lane.submit_step("a", 2 * number + 2)
        await lane.go_on(1)
        lane.scheduler.close_run("b")
        lane.scheduler.add_run("e")
        lane.submit("e", 0, CreateModel("e", LoraConfig(lora_rank=1, seed=0)))
        await lane.go_on(5)
        calls = await lane.look_at_calls()
        assert {"UnloadModel b", "CreateModel e"} <= set(calls[:6])

    run_lane(test)


def test_a_run_that_can_not_end_yet_holds_up_nothing() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.may_close = False
        lane.scheduler.close_run("b")
        await lane.look_at_calls()
        lane.submit_pass("a", 1, 30)
        await lane.look_at_calls()
        lane.submit_step("a", 2)
        assert await lane.look_at_calls() == ["a", "OptimStep a"]
        lane.may_close = True
        lane.scheduler.wake()
        await lane.go_on(2)
        assert (await lane.look_at_calls())[2:] == ["UnloadModel b"]

    run_lane(test)


def test_what_a_dead_trainer_had_fails_with_its_death() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_pass("a", 1, 30)
        await lane.look_at_calls()
        lane.submit_step("a", 2)
        lane.submit_pass("b", 1, 30)
        await lane.look_at_calls()
        lane.scheduler.mark_all_lost()
        lane.trainer.die()
        assert await lane.look_at_calls() == ["a", "OptimStep a"]
        for run, seq_id in (("a", 1), ("a", 2), ("b", 1)):
            assert isinstance(lane.get_result(run, seq_id), WorkerDiedError)
        lane.scheduler.add_run("e")
        lane.submit("e", 0, CreateModel("e", LoraConfig(lora_rank=1, seed=0)))
        assert (await lane.look_at_calls())[2:] == ["CreateModel e"]

    run_lane(test)


def test_a_server_that_stops_waits_for_none_of_what_was_sent() -> None:
    async def test(lane: Lane) -> None:
        await lane.go_on(1)
        lane.submit_pass("a", 1, 30)
        await lane.look_at_calls()
        lane.submit_step("a", 2)
        await lane.look_at_calls()
        lane.lane.cancel()
        await asyncio.gather(lane.lane, return_exceptions=True)
        await lane.scheduler.drain(timeout_s=0)
        assert [reply.cancelled() for _, reply in lane.trainer.replies] == [True, True]

    run_lane(test, ends=True)
