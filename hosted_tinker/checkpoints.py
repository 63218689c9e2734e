"""Saves captured states as checkpoints: files first, then the record, so that none is ever partial."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hosted_tinker.errors import HostedTinkerError, UserError
from hosted_tinker.store.checkpoint_files import CheckpointFiles
from hosted_tinker.store.metadata import Metadata
from hosted_tinker.store.records import Checkpoint, RunRecord, SamplingSession
from hosted_tinker.tinker_path import TinkerPath
from hosted_tinker.types import AdapterRef, PersistState
from hosted_tinker.workers.group import WorkerGroup


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What a client may say about a checkpoint that it saves."""

    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


class CheckpointSaver:
    """Writes what the trainer captured, and records it."""

    def __init__(self, trainer: WorkerGroup, files: CheckpointFiles, metadata: Metadata) -> None:
        self._trainer = trainer
        self._files = files
        self._metadata = metadata

    def check_name(self, path: TinkerPath, options: SaveOptions) -> None:
        """Raises UserError if the name is taken and may not be overwritten."""
        if not options.overwrite and self._metadata.find_checkpoint(path):
            raise UserError(
                f"checkpoint {path} exists; choose another name, delete it first, or overwrite it"
            )

    async def save_named(
        self, snapshot_id: str, path: TinkerPath, options: SaveOptions, *, step: int
    ) -> Checkpoint:
        """Raises UserError if the name was taken while this was being written."""
        temporary = await self._persist(snapshot_id)
        self._check_or_discard(temporary, path, options)
        version = new_version()
        size_bytes = self._files.measure(temporary)
        checkpoint = Checkpoint(
            path=path,
            version=version,
            directory=self._files.publish(temporary, path, version),
            size_bytes=size_bytes,
            step=step,
            expires_at=None if options.ttl_seconds is None else time.time() + options.ttl_seconds,
            user_metadata=options.user_metadata,
        )
        self._metadata.put_checkpoint(checkpoint)
        return checkpoint

    async def save_snapshot(self, snapshot_id: str) -> tuple[str, str]:
        """Writes it under no name. Returns its version, and its directory, which the caller records."""
        temporary = await self._persist(snapshot_id)
        version = new_version()
        return version, self._files.publish(temporary, None, version)

    async def save_ephemeral(
        self, snapshot_id: str, run: RunRecord, sampling_session_id: str
    ) -> AdapterRef:
        """Snapshots a run for one sampling session, which owns the files until it ends."""
        version, directory = await self.save_snapshot(snapshot_id)
        adapter = AdapterRef(f"{run.model_id}@{version}", Path(directory))
        self._metadata.put_sampling_session(
            SamplingSession(
                sampling_session_id=sampling_session_id,
                session_id=run.session_id,
                base_model=run.base_model,
                model_path=None,
                adapter=adapter,
            )
        )
        return adapter

    def _check_or_discard(self, temporary: Path, path: TinkerPath, options: SaveOptions) -> None:
        try:
            self.check_name(path, options)
        except UserError:
            self._files.discard(temporary)
            raise

    async def _persist(self, snapshot_id: str) -> Path:
        temporary = self._files.make_temporary()
        try:
            await self._trainer.call(PersistState(snapshot_id, temporary))
        except HostedTinkerError:
            self._files.discard(temporary)
            raise
        return temporary


def new_version() -> str:
    """Unique for ever: engines cache adapters under it."""
    return uuid.uuid4().hex[:12]
