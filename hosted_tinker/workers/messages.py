"""Everything that crosses the pipe between the API process and a worker process.

Parent to worker: `Call`, `Stop`. Worker to parent: `Progress` until `Ready`, then one `Reply` for
each call, in the order in which the calls end, and `Partial` before the reply of a streamed sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hosted_tinker.errors import Category
from hosted_tinker.types import (
    BaseModelInfo,
    CancelSample,
    DescribeTokenizer,
    NewToken,
    RenderChat,
    Sample,
    TrainingOperation,
)

SamplerOperation = Sample | CancelSample | DescribeTokenizer | RenderChat
WorkerOperation = TrainingOperation | SamplerOperation
Role = Literal["trainer", "sampler", "shared"]
"""What a process does; `shared` does both on one base model."""


@dataclass(frozen=True, slots=True)
class Call:
    """Asks a worker to run an operation. Ranks of a group get the same calls in one order."""

    call_id: int
    operation: WorkerOperation


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks a worker to end."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker that loads is doing, for people to read."""

    phase: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The base model is loaded."""

    base_model: BaseModelInfo


@dataclass(frozen=True, slots=True)
class Failure:
    """An operation that raised. `traceback` is set for unexpected exceptions only, for the log."""

    message: str
    category: Category
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a call. `output` is what the operation returned."""

    call_id: int
    output: Any | Failure


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens that one step of the engine drew for a streamed sample. The reply has them all."""

    call_id: int
    tokens: Sequence[NewToken]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The worker can't start; it exits after this. The message is shown to the operator."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker process is: read once, at its start.

    Attributes:
        role: which loop to run.
        base_model: a hub id or a local directory.
        backend: name of the training backend, which also decides the embedded engine.
        backend_config: the validated section of the settings.
    """

    role: Role
    base_model: str
    backend: str
    backend_config: Any
    rank: int = 0
    world_size: int = 1


ToWorker = Call | Stop
FromWorker = Progress | Ready | LoadFailed | Partial | Reply
