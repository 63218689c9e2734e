"""One worker process, seen from the parent: start it, send to it, hear from it, end it."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from hosted_tinker.workers.messages import FromWorker, Role, Stop, ToWorker, WorkerSpec

COMMON_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # GPU indices mean what nvidia-smi calls them.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
# Two processes share the cores: threads of the one that waits must not spin on them.
BESIDE_ANOTHER = {**COMMON_ENVIRONMENT, "OMP_WAIT_POLICY": "PASSIVE"}
KEEP_FREED_MEMORY = {
    # glibc gives large blocks back to the system and takes page faults to have them again, which
    # attention that gathers its keys does in every layer.
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}
ENVIRONMENTS: Mapping[Role, Mapping[str, str]] = {
    "trainer": BESIDE_ANOTHER,
    # A step is hundreds of short products, and threads that sleep between them wake late. Spinning for
    # some microseconds is the middle: longer is faster alone, and slower beside a trainer.
    "sampler": {**BESIDE_ANOTHER, **KEEP_FREED_MEMORY, "GOMP_SPINCOUNT": "3000"},
    "shared": {**COMMON_ENVIRONMENT, **KEEP_FREED_MEMORY, "GOMP_SPINCOUNT": "10000"},
}
"""Defaults; what the operator has set stays."""


class WorkerProcess:
    """Owns the operating-system process and two threads that move messages.

    `on_message` is called on a thread, with None when the process is gone.
    """

    def __init__(self, spec: WorkerSpec, on_message: Callable[[FromWorker | None], None]) -> None:
        self._on_message = on_message
        self._outbox: queue.SimpleQueue[ToWorker | WorkerSpec | None] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hosted_tinker.workers.main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A session of its own: Ctrl-C in the terminal is the parent's to handle.
                start_new_session=True,
                env={**ENVIRONMENTS[spec.role], **os.environ},
            )
        self._outbox.put(spec)
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"worker-{target.__name__}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Queues a message; never blocks."""
        self._outbox.put(message)

    def end(self, timeout_s: float) -> None:
        """Asks the process to stop, and kills it after `timeout_s`. Blocks."""
        self._outbox.put(Stop())
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._outbox.put(None)

    def _read(self) -> None:
        while True:
            try:
                message: FromWorker = self._connection.recv()
            except (EOFError, OSError):
                self._process.wait()
                self._outbox.put(None)
                self._on_message(None)
                return
            self._on_message(message)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return
