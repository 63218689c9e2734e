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

LORA = LoraConfig(lora_rank=1, seed=0, train_mlp=False, train_unembed=False)
"""A fresh adapter is an exact no-op; the smallest one costs the least."""


class BaseAdapter:
    """Made by the trainer, once, below the state directory."""

    def __init__(self, trainer: WorkerGroup, state_dir: Path) -> None:
        self._trainer = trainer
        self._directory = state_dir.resolve() / "base-adapter"
        self._name = f"base@{new_version()}"
        self._making: asyncio.Task[AdapterRef] | None = None

    async def get(self) -> AdapterRef:
        """Waits for the trainer the first time. Raises HostedTinkerError."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    async def _make(self) -> AdapterRef:
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        await self._trainer.call(CreateModel(self._name, LORA))
        await self._trainer.call(CaptureState(self._name, self._name, with_optimizer=False))
        await self._trainer.call(UnloadModel(self._name))
        await self._trainer.call(PersistState(self._name, self._directory))
        return AdapterRef(self._name, self._directory)
