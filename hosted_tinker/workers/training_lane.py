"""The training side of a worker: runs calls one at a time, in order; writes checkpoints beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hosted_tinker.errors import HostedTinkerError, UserError
from hosted_tinker.training.backend import TrainBackend
from hosted_tinker.types import (
    CaptureState,
    ClearGradients,
    CreateModel,
    ForwardBackward,
    ForwardBackwardOutput,
    JointForwardBackward,
    LoadState,
    OptimStep,
    OptimStepOutput,
    PersistState,
    TrainingOperation,
    UnloadModel,
)
from hosted_tinker.workers.messages import Call, FromWorker, Reply
from hosted_tinker.workers.replies import describe_failure


class TrainingLane:
    """Replies to every call, whatever becomes of it."""

    def __init__(self, backend: TrainBackend, send: Callable[[FromWorker], None]) -> None:
        self._backend = backend
        self._send = send
        self._failed_runs: set[str] = set()
        self._persist_lane = ThreadPoolExecutor(1, thread_name_prefix="persist")

    def run(self, call: Call) -> None:
        if isinstance(call.operation, PersistState):
            self._persist_lane.submit(self._run, call)
        else:
            self._run(call)

    def _run(self, call: Call) -> None:
        try:
            output: Any = self._compute(call.operation)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # noqa: BLE001 - becomes the call's Failure
            output = describe_failure(error)
        self._send(Reply(call.call_id, output))

    def _compute(self, operation: TrainingOperation) -> Any:
        backend = self._backend
        match operation:
            case JointForwardBackward(operations):
                return self._run_passes(operations)
            case OptimStep():
                return self._take_step(operation)
            case CreateModel(model_id, lora):
                return backend.create_model(model_id, lora)
            case UnloadModel(model_id):
                return backend.unload_model(model_id)
            case ClearGradients(model_id):
                return backend.clear_gradients(model_id)
            case CaptureState(model_id, snapshot_id, with_optimizer):
                return backend.capture_state(model_id, snapshot_id, with_optimizer=with_optimizer)
            case PersistState(snapshot_id, directory):
                return backend.persist_state(snapshot_id, directory)
            case LoadState(model_id, directory, with_optimizer, create):
                return backend.load_state(
                    model_id, directory, with_optimizer=with_optimizer, create=create
                )

    def _run_passes(
        self, operations: Sequence[ForwardBackward]
    ) -> list[ForwardBackwardOutput | HostedTinkerError]:
        """Remembers which runs' gradients miss a part: all of them, if the call raises."""
        self._failed_runs = {one.model_id for one in operations if not one.forward_only}
        outputs = self._backend.forward_backward(operations)
        self._failed_runs = {
            one.model_id
            for one, output in zip(operations, outputs, strict=True)
            if isinstance(output, HostedTinkerError) and not one.forward_only
        }
        return outputs

    def _take_step(self, step: OptimStep) -> OptimStepOutput:
        if step.unless_pass_failed and step.model_id in self._failed_runs:
            self._failed_runs.remove(step.model_id)
            self._backend.clear_gradients(step.model_id)
            raise UserError("the forward_backward before it failed")
        return self._backend.optim_step(step.model_id, step.adam)
