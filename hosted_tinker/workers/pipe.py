"""The worker's end of the pipe to the API process."""

from __future__ import annotations

import os
import queue
import threading
from multiprocessing.connection import Connection

from hosted_tinker.workers.messages import Call, FromWorker, Stop


class Pipe:
    """Any thread sends; one thread reads, so that the death of the parent is noticed in a long pass."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def send(self, message: FromWorker) -> None:
        with self._send_lock:
            self._connection.send(message)

    def take(self, *, block: bool) -> list[Call]:
        """All calls that have arrived, in order; waits for one if `block`."""
        calls = [self._inbox.get()] if block else []
        while not self._inbox.empty():
            calls.append(self._inbox.get())
        return calls

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
            self._inbox.put(message)
