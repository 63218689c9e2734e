"""A group of worker processes that act as one: the parent's side.

Every rank gets the same calls in the same order; rank 0's reply is the group's. When a rank dies,
the whole group is started anew: calls in flight fail, and what lived in the processes is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from hosted_tinker.errors import (
    HostedTinkerError,
    SettingsError,
    UserError,
    WorkerDiedError,
    WorkerFailedError,
)
from hosted_tinker.types import BaseModelInfo, NewToken
from hosted_tinker.workers.messages import (
    Call,
    Failure,
    FromWorker,
    LoadFailed,
    Partial,
    Progress,
    Ready,
    Reply,
    Role,
    WorkerOperation,
    WorkerSpec,
)
from hosted_tinker.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
TITLES: dict[Role, str] = {
    "trainer": "trainer",
    "sampler": "sampler",
    "shared": "training and sampling",
}
OnTokens = Callable[[Sequence[NewToken]], None]


class GroupState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class WorkerGroup:
    """Starts the ranks, carries calls to them, and starts them anew when one dies.

    Lives on one event loop. Calls may come before `start`: they wait. `base_model` is set once the
    group was ready for the first time.
    """

    def __init__(self, role: Role, on_restart: Callable[[], None]) -> None:
        self.role: Role = role
        self._title = TITLES[role]
        self._on_restart = on_restart
        self._specs: Sequence[WorkerSpec] = ()
        self._ranks: list[WorkerProcess] = []
        self._ready_ranks = 0
        self._generation = 0
        self._next_call_id = 0
        self._in_flight: dict[int, asyncio.Future[Any]] = {}
        self._on_tokens: dict[int, OnTokens] = {}
        self._settled = asyncio.Event()
        self._failure: HostedTinkerError | None = None
        self._stopping = False
        self.state = GroupState.LOADING
        self.phase = "starting"
        self.base_model: BaseModelInfo | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [rank.pid for rank in self._ranks]

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts a process for each rank; `wait_ready` says when they have loaded."""
        self._specs = specs
        self._generation += 1
        self._ready_ranks = 0
        self._settled.clear()
        self.state, self.phase = GroupState.LOADING, "starting"
        loop = asyncio.get_running_loop()
        self._ranks = []
        for spec in self._specs:
            receive = partial(self._receive, self._generation, spec.rank)
            self._ranks.append(WorkerProcess(spec, partial(post, loop, receive)))

    async def wait_ready(self) -> BaseModelInfo:
        """Raises the reason if the group can't load."""
        # It may have died and be loading anew by the time that the waiter goes on.
        while not self._settled.is_set():
            await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        assert self.base_model is not None
        return self.base_model

    async def call(self, operation: WorkerOperation, on_tokens: OnTokens | None = None) -> Any:
        """What rank 0 returned for the operation, once the group is ready.

        Args:
            on_tokens: called with the tokens of a streamed sample as they come.

        Raises:
            UserError: the request is wrong.
            WorkerFailedError: the operation raised something unexpected; it is logged.
            WorkerDiedError: a rank died before the reply.
        """
        await self.wait_ready()
        return await self.begin(operation, on_tokens)

    def begin(
        self, operation: WorkerOperation, on_tokens: OnTokens | None = None
    ) -> asyncio.Future[Any]:
        """Sends the operation. The future ends as `call` does; at once, if the group is not ready."""
        reply = asyncio.get_running_loop().create_future()
        if self.state is not GroupState.READY:
            reply.set_exception(WorkerDiedError(f"the {self._title} process is not there"))
            return reply
        call_id = self._next_call_id
        self._next_call_id += 1
        reply.add_done_callback(lambda _: self._forget(call_id))
        self._in_flight[call_id] = reply
        if on_tokens is not None:
            self._on_tokens[call_id] = on_tokens
        self._send(Call(call_id, operation))
        return reply

    def _forget(self, call_id: int) -> None:
        self._in_flight.pop(call_id, None)
        self._on_tokens.pop(call_id, None)

    def post(self, operation: WorkerOperation) -> None:
        """Sends an operation whose reply nobody waits for, if the group is ready."""
        if self.state is GroupState.READY:
            self._next_call_id += 1
            self._send(Call(self._next_call_id - 1, operation))

    def _send(self, call: Call) -> None:
        for rank in self._ranks:
            rank.send(call)

    async def stop(self) -> None:
        """Ends the processes."""
        self._stopping = True
        await asyncio.gather(*(asyncio.to_thread(rank.end, STOP_TIMEOUT_S) for rank in self._ranks))

    def _receive(self, generation: int, rank: int, message: FromWorker | None) -> None:
        if generation != self._generation or self._stopping:
            return
        match message:
            case None:
                self._handle_death(rank)
            case Progress(phase):
                self.phase = phase
            case Ready(base_model):
                self._handle_ready(base_model)
            case LoadFailed(failure):
                self._handle_load_failure(failure)
            case Partial(call_id, tokens):
                if on_tokens := self._on_tokens.get(call_id):
                    on_tokens(tokens)
            case Reply(call_id, output):
                if rank == 0:
                    self._handle_reply(call_id, output)

    def _handle_ready(self, base_model: BaseModelInfo) -> None:
        self._ready_ranks += 1
        if self._ready_ranks == len(self._ranks):
            self.base_model = base_model
            self.state, self.phase = GroupState.READY, "ready"
            logger.info("%s ready model=%s", self._title, base_model.architecture)
            self._settled.set()

    def _handle_load_failure(self, failure: Failure) -> None:
        if failure.traceback:
            logger.error("%s failed:\n%s", self._title, failure.traceback)
        # A group that had loaded is started anew when the process is gone, which comes next.
        if self.state is GroupState.LOADING:
            self._fail_for_good(failure.message)

    def _fail_for_good(self, message: str) -> None:
        """A group that can't load is not started again: it would fail the same way."""
        if self.base_model is None:
            self._failure = SettingsError(message)
        else:
            self._failure = WorkerFailedError(f"the {self._title} can't be started anew: {message}")
            logger.error("%s", self._failure)
        self.state = GroupState.FAILED
        self._settled.set()

    def _handle_reply(self, call_id: int, output: Any) -> None:
        reply = self._in_flight.get(call_id)
        if reply is None or reply.done():
            return
        if isinstance(output, Failure):
            reply.set_exception(self._to_error(output))
        else:
            reply.set_result(output)

    def _to_error(self, failure: Failure) -> HostedTinkerError:
        if failure.traceback:
            logger.error("%s operation failed:\n%s", self._title, failure.traceback)
            return WorkerFailedError(failure.message)
        is_user = failure.category == "user"
        return UserError(failure.message) if is_user else WorkerFailedError(failure.message)

    def _handle_death(self, rank: int) -> None:
        """Fails what was in flight and starts the group anew, if it had loaded."""
        died = WorkerDiedError(f"the {self._title} process (rank {rank}) died during the operation")
        for reply in self._in_flight.values():
            if not reply.done():
                reply.set_exception(died)
        for other in self._ranks:
            other.end(timeout_s=0)
        if self.state is GroupState.FAILED:
            return
        if self.state is GroupState.LOADING:
            self._fail_for_good(f"the {self._title} process ended while it loaded the model")
            return
        logger.warning("%s process died rank=%d; starting the group anew", self._title, rank)
        self._on_restart()
        self.start(self._specs)


def post(
    loop: asyncio.AbstractEventLoop,
    receive: Callable[[FromWorker | None], None],
    message: FromWorker | None,
) -> None:
    """Hands a message from a thread to the loop, unless that has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(receive, message)
