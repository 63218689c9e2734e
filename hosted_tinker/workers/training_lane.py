"""The training side of a worker: runs calls one at a time, in order; writes checkpoints beside them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hosted_tinker.training.backend import TrainBackend
from hosted_tinker.types import (
    CaptureState,
    ClearGradients,
    CreateModel,
    JointForwardBackward,
    LoadState,
    OptimStep,
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
        self._persist_lane = ThreadPoolExecutor(1, thread_name_prefix="persist")

    def run(self, call: Call) -> None:
        if isinstance(call.operation, PersistState):
            self._persist_lane.submit(self._run, call)
        else:
            self._run(call)

    def _run(self, call: Call) -> None:
        try:
            output: Any = run_operation(self._backend, call.operation)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # noqa: BLE001 - becomes the call's Failure
            output = describe_failure(error)
        self._send(Reply(call.call_id, output))


def run_operation(backend: TrainBackend, operation: TrainingOperation) -> Any:
    match operation:
        case JointForwardBackward(operations):
            return backend.forward_backward(operations)
        case OptimStep(model_id, adam):
            return backend.optim_step(model_id, adam)
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
