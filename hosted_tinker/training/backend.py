"""What a training backend is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.types import (
    AdamParams,
    BaseModelInfo,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepOutput,
)

ReportProgress = Callable[[str], None]


class TrainBackend(Protocol):
    """Holds a base model once, and every run's adapter, gradients and optimizer state.

    A worker process calls these one at a time, on one thread. Only `persist_state` runs on another
    thread, beside the others. Every rank of a group gets the same calls in the same order.
    Anything wrong with a request raises UserError and changes nothing.
    """

    def describe_base_model(self) -> BaseModelInfo:
        """What the API process needs to know of the model."""
        ...

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        """Adds a run with a fresh adapter: A Kaiming-uniform by `lora.seed`, B zero."""
        ...

    def unload_model(self, model_id: str) -> None:
        """Frees a run. Unknown ids are ignored."""
        ...

    def forward_backward(
        self, operations: Sequence[ForwardBackward]
    ) -> list[ForwardBackwardOutput | HostedTinkerError]:
        """Of each, sums the loss over tokens and data, and adds its gradient unless `forward_only`.

        They may be of one run or of many. One that fails changes nothing and holds up no other.
        """
        ...

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepOutput:
        """One AdamW step with the accumulated gradient, which is cleared."""
        ...

    def clear_gradients(self, model_id: str) -> None:
        """Drops the accumulated gradient."""
        ...

    def capture_state(self, model_id: str, snapshot_id: str, *, with_optimizer: bool) -> None:
        """Copies a run's state to host memory under `snapshot_id`."""
        ...

    def persist_state(self, snapshot_id: str, directory: Path) -> None:
        """Writes a captured state into an empty directory and forgets it."""
        ...

    def load_state(
        self, model_id: str, directory: Path, *, with_optimizer: bool, create: bool
    ) -> None:
        """Sets a run's adapter and, if asked, optimizer from a directory."""
        ...
