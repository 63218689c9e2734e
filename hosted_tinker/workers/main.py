"""A worker process: receives calls, runs them, replies. `python -m hosted_tinker.workers.main FD`.

The first message on the pipe is the `WorkerSpec`. One thread reads the pipe, so that the death of
the parent is noticed during a long pass; the main thread owns the model; a trainer has a third that
writes checkpoints.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.sampling.engine import SamplingEngine
from hosted_tinker.training.backend import TrainBackend
from hosted_tinker.types import (
    CancelSample,
    CaptureState,
    ClearGradients,
    CreateModel,
    DescribeTokenizer,
    JointForwardBackward,
    LoadState,
    NewToken,
    OptimStep,
    PersistState,
    RenderChat,
    Sample,
    SampleOutput,
    TrainingOperation,
    UnloadModel,
)
from hosted_tinker.workers.loading import load_backend, load_engine
from hosted_tinker.workers.messages import (
    Call,
    Failure,
    FromWorker,
    LoadFailed,
    Partial,
    Progress,
    Ready,
    Reply,
    Stop,
    WorkerSpec,
)


class Pipe:
    """The worker's end: any thread sends, one thread reads into `inbox`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self.inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def send(self, message: FromWorker) -> None:
        with self._send_lock:
            self._connection.send(message)

    def start_reading(self) -> None:
        threading.Thread(target=self._read, name="pipe-reader", daemon=True).start()

    def _read(self) -> None:
        """Ends the process at once on `Stop`, and when the parent is gone."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Stop):
                os._exit(0)
            self.inbox.put(message)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    connection = Connection(int(sys.argv[1]))
    spec: WorkerSpec = connection.recv()
    pipe = Pipe(connection)
    pipe.start_reading()
    serve = serve_trainer if spec.role == "trainer" else serve_sampler
    try:
        serve(spec, pipe)
    except HostedTinkerError as error:
        pipe.send(LoadFailed(describe_failure(error)))
    except Exception as error:  # noqa: BLE001 - the process ends; the parent logs and restarts it
        pipe.send(LoadFailed(describe_failure(error)))
    os._exit(1)


def serve_trainer(spec: WorkerSpec, pipe: Pipe) -> None:
    """Runs calls one at a time, in order; writes checkpoints beside them."""
    backend = load_backend(spec, lambda phase: pipe.send(Progress(phase)))
    pipe.send(Ready(backend.describe_base_model()))
    persist_lane = ThreadPoolExecutor(1, thread_name_prefix="persist")
    while True:
        call = pipe.inbox.get()
        if isinstance(call.operation, PersistState):
            persist_lane.submit(run_call, pipe, call, backend)
        else:
            run_call(pipe, call, backend)


def run_call(pipe: Pipe, call: Call, backend: TrainBackend) -> None:
    try:
        output: Any = run_operation(backend, call.operation)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # noqa: BLE001 - becomes the call's Failure
        output = describe_failure(error)
    pipe.send(Reply(call.call_id, output))


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


def serve_sampler(spec: WorkerSpec, pipe: Pipe) -> None:
    """Steps the engine while it has work, and takes new requests between steps."""
    call_ids: dict[str, int] = {}
    new_tokens: dict[str, list[NewToken]] = {}

    def finish(request_id: str, result: SampleOutput | Failure) -> None:
        new_tokens.pop(request_id, None)
        pipe.send(Reply(call_ids.pop(request_id), result))

    def report(request_id: str, token: NewToken) -> None:
        new_tokens.setdefault(request_id, []).append(token)

    engine = load_engine(spec, lambda phase: pipe.send(Progress(phase)), finish, report)
    pipe.send(Ready(engine.describe_base_model()))
    while True:
        for call in take_calls(pipe.inbox, block=not engine.has_work):
            accept_call(engine, call, call_ids, pipe.send)
        if engine.has_work:
            engine.step()
        for request_id, tokens in new_tokens.items():
            pipe.send(Partial(call_ids[request_id], tokens))
        new_tokens.clear()


def take_calls(inbox: queue.SimpleQueue[Call], *, block: bool) -> list[Call]:
    """All calls that have arrived; waits for one if `block`."""
    calls = [inbox.get()] if block else []
    while not inbox.empty():
        calls.append(inbox.get())
    return calls


def accept_call(
    engine: SamplingEngine,
    call: Call,
    call_ids: dict[str, int],
    send: Callable[[FromWorker], None],
) -> None:
    match call.operation:
        case Sample(request_id):
            call_ids[request_id] = call.call_id
            engine.add(call.operation)
        case CancelSample(request_id):
            engine.cancel(request_id)
            send(Reply(call.call_id, None))
        case DescribeTokenizer() | RenderChat():
            send(Reply(call.call_id, answer_about_text(engine, call.operation)))
        case _:
            raise AssertionError(f"a sampler got {call.operation}")


def answer_about_text(engine: SamplingEngine, operation: DescribeTokenizer | RenderChat) -> Any:
    try:
        if isinstance(operation, RenderChat):
            return engine.render_chat(operation)
        return engine.describe_tokenizer()
    except Exception as error:  # noqa: BLE001 - becomes the call's Failure
        return describe_failure(error)


def describe_failure(error: Exception) -> Failure:
    """What the parent shows: our own errors as they are, others with their traceback for the log."""
    if isinstance(error, HostedTinkerError):
        return Failure(str(error), error.category)
    return Failure(f"{type(error).__name__}: {error}", "server", traceback.format_exc())


if __name__ == "__main__":
    main()
