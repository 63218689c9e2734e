"""Checkpoint directories: one exists only if it is complete, and its content never changes.

A directory is written under a temporary name and renamed. Its name ends in the checkpoint's
version, so that a name that is saved again gets a directory of its own.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from hosted_tinker.tinker_path import TinkerPath
from hosted_tinker.types import AdapterRef

TEMPORARY = ".incomplete"
SNAPSHOTS = "snapshots"


class CheckpointFiles:
    """The directories below `{state_dir}/checkpoints`."""

    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir.resolve()
        self._temporary = self._root / "checkpoints" / TEMPORARY

    def prepare(self) -> None:
        """Creates the directories, and removes what an earlier process left incomplete."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)

    def make_temporary(self) -> Path:
        """An empty directory to write a checkpoint into."""
        directory = self._temporary / uuid.uuid4().hex
        directory.mkdir()
        return directory

    def publish(self, temporary: Path, path: TinkerPath | None, version: str) -> str:
        """Gives a complete directory its name, relative to the state directory.

        With no path it is a snapshot that only a sampling session knows.
        """
        if path is None:
            relative = Path("checkpoints", SNAPSHOTS, version)
        else:
            relative = Path(
                "checkpoints", path.model_id, path.kind.segment, f"{path.name}-{version}"
            )
        directory = self._root / relative
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(directory)
        sync_directory(directory.parent)
        return str(relative)

    def resolve(self, relative: str | Path) -> Path:
        """The absolute directory."""
        return self._root / relative

    def resolve_adapter(self, adapter: AdapterRef) -> AdapterRef:
        """The same adapter with an absolute directory."""
        return replace(adapter, directory=self.resolve(adapter.directory))

    def measure(self, directory: Path) -> int:
        """Bytes of the files in a directory."""
        return sum(file.stat().st_size for file in directory.iterdir())

    def discard(self, temporary: Path) -> None:
        """Removes a temporary directory that will not be published."""
        shutil.rmtree(temporary, ignore_errors=True)

    def list_unused(self, in_use: Set[str]) -> list[Path]:
        """Published directories that are not in use, and that nothing can refer to any more."""
        checkpoints = self._root / "checkpoints"
        published = [*checkpoints.glob(f"{SNAPSHOTS}/*"), *checkpoints.glob("*/*weights/*")]
        return [
            directory
            for directory in published
            if str(directory.relative_to(self._root)) not in in_use
        ]

    def remove(self, directories: Sequence[Path]) -> None:
        """Deletes directories. Takes as long as the disk takes: not for an event loop."""
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Makes a rename in the directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
