"""An adapter that changes nothing, for an engine that can't be asked for the bare base model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from hosted_tinker.checkpoints import new_version
from hosted_tinker.types import (
    AdapterRef,
    CaptureState,
    CreateModel,
    LoraConfig,
    PersistState,
    UnloadModel,
)
from hosted_tinker.workers.group import WorkerGroup

BASE_PREFIX = "base@"
LORA = LoraConfig(lora_rank=1, seed=0, train_mlp=False, train_unembed=False)
"""A fresh adapter is an exact no-op; the smallest one costs the least."""


class BaseAdapter:
    """Made by the trainer, once, below the state directory."""

    def __init__(self, trainer: WorkerGroup, state_dir: Path) -> None:
        self._trainer = trainer
        self._directory = state_dir.resolve() / "base-adapter"
        self._making: asyncio.Task[AdapterRef] | None = None

    async def get(self) -> AdapterRef:
        """Waits for the trainer the first time. Raises HostedTinkerError; the next call tries again."""
        if self._making is None or has_failed(self._making):
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    async def _make(self) -> AdapterRef:
        name = f"{BASE_PREFIX}{new_version()}"
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        await self._trainer.call(CreateModel(name, LORA))
        try:
            await self._trainer.call(CaptureState(name, name, with_optimizer=False))
        finally:
            await self._trainer.call(UnloadModel(name))
        await self._trainer.call(PersistState(name, self._directory))
        return AdapterRef(name, self._directory)


def has_failed(task: asyncio.Task[AdapterRef]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
