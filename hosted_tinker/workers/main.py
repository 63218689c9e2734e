"""A worker process: receives calls, runs them, replies. `python -m hosted_tinker.workers.main FD`.

The first message on the pipe is the `WorkerSpec`. One thread reads the pipe; the main thread runs the
model; one that trains has a third that writes checkpoints.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from hosted_tinker.workers.loading import load_backend, load_engine, load_shared
from hosted_tinker.workers.messages import LoadFailed, Progress, Ready, WorkerSpec
from hosted_tinker.workers.pipe import Pipe
from hosted_tinker.workers.replies import describe_failure
from hosted_tinker.workers.sampling_lane import SamplingLane, SamplingResults
from hosted_tinker.workers.shared_device import SharedDevice
from hosted_tinker.workers.training_lane import TrainingLane
from hosted_tinker.workers.turns import Turns


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    connection = Connection(int(sys.argv[1]))
    spec: WorkerSpec = connection.recv()
    pipe = Pipe(connection)
    pipe.start_reading()
    serve = {"trainer": serve_trainer, "sampler": serve_sampler, "shared": serve_both}[spec.role]
    try:
        serve(spec, pipe)
    except Exception as error:  # noqa: BLE001 - the process ends; the parent logs and restarts it
        pipe.send(LoadFailed(describe_failure(error)))
    os._exit(1)


def serve_trainer(spec: WorkerSpec, pipe: Pipe) -> None:
    backend = load_backend(spec, lambda phase: pipe.send(Progress(phase)))
    pipe.send(Ready(backend.describe_base_model()))
    lane = TrainingLane(backend, pipe.send)
    while True:
        for call in pipe.take(block=True):
            lane.run(call)


def serve_sampler(spec: WorkerSpec, pipe: Pipe) -> None:
    """Steps the engine while it has work, and takes new requests between steps."""
    results = SamplingResults(pipe.send)
    engine = load_engine(spec, lambda phase: pipe.send(Progress(phase)), results)
    pipe.send(Ready(engine.describe_base_model()))
    lane = SamplingLane(engine, results, pipe.send)
    while True:
        for call in pipe.take(block=not lane.has_work):
            lane.accept(call)
        if lane.has_work:
            lane.step()


def serve_both(spec: WorkerSpec, pipe: Pipe) -> None:
    results = SamplingResults(pipe.send)
    device = SharedDevice(pipe, Turns(spec.backend_config.sampling_share))
    both = load_shared(spec, lambda phase: pipe.send(Progress(phase)), results, device.turn)
    pipe.send(Ready(both.backend.describe_base_model()))
    device.run_forever(
        TrainingLane(both.backend, pipe.send),
        SamplingLane(both.engine, results, pipe.send),
        both.queue,
    )


if __name__ == "__main__":
    main()
