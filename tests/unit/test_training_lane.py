"""What a worker does with a step that was sent before the pass before it had ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hosted_tinker.backend_configs import FakeConfig
from hosted_tinker.training.fake import FakeBackend
from hosted_tinker.types import (
    AdamParams,
    CreateModel,
    Datum,
    ForwardBackward,
    JointForwardBackward,
    LoraConfig,
    OptimStep,
)
from hosted_tinker.workers.messages import Call, Failure
from hosted_tinker.workers.training_lane import TrainingLane

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


class Worker:
    """Two runs on the fake backend."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self._lane = TrainingLane(FakeBackend(FakeConfig()), self.replies.append)
        for run in "ab":
            self.run(CreateModel(run, LoraConfig(lora_rank=2, seed=0)))

    def run(self, operation: Any) -> Any:
        self._lane.run(Call(0, operation))
        return self.replies[-1].output

    def run_passes(self, weights: dict[str, float], *, forward_only: bool = False) -> list[Any]:
        """One of four tokens for each run, whose loss is not finite if the weight is not."""
        tokens = np.arange(4)
        return self.run(
            JointForwardBackward(
                [
                    ForwardBackward(
                        run,
                        [Datum(tokens, {"target_tokens": tokens, "weights": np.full(4, weight)})],
                        "cross_entropy",
                        forward_only=forward_only,
                    )
                    for run, weight in weights.items()
                ]
            )
        )

    def step(self, run: str, *, unless_pass_failed: bool = True) -> Any:
        return self.run(OptimStep(run, AdamParams(1e-2), unless_pass_failed))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_step_behind_a_failed_pass_is_refused_once_and_its_gradient_dropped(worker: Worker) -> None:
    worker.run_passes({"a": 1.0, "b": 1.0})
    worker.run_passes({"a": float("inf"), "b": 1.0})
    refused = worker.step("a")
    assert isinstance(refused, Failure)
    assert refused.category == "user"
    assert worker.step("b").metrics["grad_norm"] > 0
    assert worker.step("a").metrics["grad_norm"] == 0


def test_a_pass_that_succeeds_refuses_nothing(worker: Worker) -> None:
    worker.run_passes({"a": float("inf")})
    worker.run_passes({"a": 1.0})
    assert worker.step("a").metrics["grad_norm"] > 0


def test_step_that_the_client_sent_after_the_failure_is_taken(worker: Worker) -> None:
    worker.run_passes({"a": 1.0})
    worker.run_passes({"a": float("inf")})
    assert worker.step("a", unless_pass_failed=False).metrics["grad_norm"] > 0


def test_failed_forward_refuses_nothing(worker: Worker) -> None:
    worker.run_passes({"a": 1.0})
    worker.run_passes({"a": float("inf")}, forward_only=True)
    assert worker.step("a").metrics["grad_norm"] > 0


def test_call_that_raises_has_failed_for_all_its_runs(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(FakeBackend, "forward_backward", fail)
        assert isinstance(worker.run_passes({"a": 1.0, "b": 1.0}), Failure)
    assert isinstance(worker.step("a"), Failure)
    assert isinstance(worker.step("b"), Failure)
