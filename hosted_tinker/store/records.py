"""The rows of the database as dataclasses."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosted_tinker.tinker_path import CheckpointKind, TinkerPath
from hosted_tinker.types import AdapterRef


@dataclass(frozen=True, slots=True)
class Session:
    """A client's session; its id is the prefix of the ids of everything made in it."""

    session_id: str
    created_at: float
    last_seen_at: float
    finished_at: float | None
    display_name: str | None
    user_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A training run. `base_model` is the name that its client asked for."""

    model_id: str
    session_id: str
    base_model: str
    created_at: float
    last_request_at: float
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `directory` is relative to the state directory.

    `step` counts the optimizer steps of its run; None if an earlier release saved it.
    """

    path: TinkerPath
    version: str
    directory: str
    size_bytes: int
    step: int | None = None
    created_at: float = field(default_factory=time.time)
    public: bool = False
    expires_at: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def adapter(self) -> AdapterRef:
        """For engines: the name is unique and never used for other weights."""
        return AdapterRef(f"{self.path.model_id}@{self.version}", Path(self.directory))


@dataclass(frozen=True, slots=True)
class RunWeights:
    """The newest weights of a run that can be sampled under its id.

    `directory` is relative to the state directory; `step` counts the run's optimizer steps.
    """

    model_id: str
    version: str
    directory: str
    step: int
    created_at: float = field(default_factory=time.time)

    @property
    def adapter(self) -> AdapterRef:
        """For engines: the name is unique and never used for other weights."""
        return AdapterRef(f"{self.model_id}@{self.version}", Path(self.directory))


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """What a sampling client samples: the base model, or an adapter."""

    sampling_session_id: str
    session_id: str
    base_model: str
    model_path: str | None
    adapter: AdapterRef | None


def dump_metadata(metadata: Mapping[str, Any]) -> str:
    """Values become strings: the SDK may send any JSON but accepts only strings back."""
    return json.dumps(
        {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in metadata.items()
        }
    )


def run_from_row(row: sqlite3.Row) -> RunRecord:
    return RunRecord(
        model_id=row["model_id"],
        session_id=row["session_id"],
        base_model=row["base_model"],
        created_at=row["created_at"],
        last_request_at=row["last_request_at"],
        lora_rank=row["lora_rank"],
        train_attn=bool(row["train_attn"]),
        train_mlp=bool(row["train_mlp"]),
        train_unembed=bool(row["train_unembed"]),
        user_metadata=json.loads(row["user_metadata"]),
    )


def checkpoint_from_row(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(
        path=TinkerPath(row["model_id"], CheckpointKind(row["kind"]), row["name"]),
        version=row["version"],
        directory=row["directory"],
        size_bytes=row["size_bytes"],
        step=row["step"],
        created_at=row["created_at"],
        public=bool(row["public"]),
        expires_at=row["expires_at"],
        user_metadata=json.loads(row["user_metadata"]),
    )


def sampling_session_from_row(row: sqlite3.Row) -> SamplingSession:
    adapter = None
    if row["adapter_name"] is not None:
        adapter = AdapterRef(row["adapter_name"], Path(row["adapter_directory"]))
    return SamplingSession(
        sampling_session_id=row["sampling_session_id"],
        session_id=row["session_id"],
        base_model=row["base_model"],
        model_path=row["model_path"],
        adapter=adapter,
    )


def run_weights_from_row(row: sqlite3.Row) -> RunWeights:
    return RunWeights(
        model_id=row["model_id"],
        version=row["version"],
        directory=row["directory"],
        step=row["step"],
        created_at=row["created_at"],
    )


def session_from_row(row: sqlite3.Row) -> Session:
    return Session(
        session_id=row["session_id"],
        created_at=row["created_at"],
        last_seen_at=row["last_seen_at"],
        finished_at=row["finished_at"],
        display_name=row["display_name"],
        user_metadata=json.loads(row["user_metadata"]),
    )
