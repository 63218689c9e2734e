"""Every SQL statement of the server, as methods that take and return dataclasses."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosted_tinker.errors import NotFoundError, UserError
from hosted_tinker.tinker_path import CheckpointKind, TinkerPath
from hosted_tinker.types import AdapterRef, LoraConfig


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
    """A complete checkpoint. `directory` is relative to the state directory."""

    path: TinkerPath
    version: str
    directory: str
    size_bytes: int
    created_at: float = field(default_factory=time.time)
    public: bool = False
    expires_at: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def adapter(self) -> AdapterRef:
        """For engines: the name is unique and never used for other weights."""
        return AdapterRef(f"{self.path.model_id}@{self.version}", Path(self.directory))


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """What a sampling client samples: the base model, or an adapter."""

    sampling_session_id: str
    session_id: str
    base_model: str
    model_path: str | None
    adapter: AdapterRef | None


class Metadata:
    """Sessions, runs, checkpoints and sampling sessions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    # --- sessions ---

    def add_session(
        self,
        session_id: str,
        *,
        user_metadata: Mapping[str, Any],
        tags: list[str],
        display_name: str | None,
        sdk_version: str | None,
    ) -> None:
        now = time.time()
        self._connection.execute(
            "INSERT INTO sessions (session_id, created_at, last_seen_at, display_name, "
            "user_metadata, tags, sdk_version) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                session_id,
                now,
                now,
                display_name,
                dump_metadata(user_metadata),
                json.dumps(tags),
                sdk_version,
            ),
        )

    def get_session(self, session_id: str) -> Session:
        """Raises NotFoundError."""
        row = self._fetch_one("SELECT * FROM sessions WHERE session_id = ?", session_id)
        if row is None:
            raise NotFoundError(f"session {session_id!r} does not exist")
        return Session(
            session_id=row["session_id"],
            created_at=row["created_at"],
            last_seen_at=row["last_seen_at"],
            finished_at=row["finished_at"],
            display_name=row["display_name"],
            user_metadata=json.loads(row["user_metadata"]),
        )

    def get_live_session(self, session_id: str) -> Session:
        """Raises NotFoundError, or UserError if it has ended."""
        session = self.get_session(session_id)
        if session.finished_at is not None:
            raise UserError(f"session {session_id!r} has ended; start a new one")
        return session

    def touch_session(self, session_id: str) -> None:
        self._connection.execute(
            "UPDATE sessions SET last_seen_at = ? WHERE session_id = ?", (time.time(), session_id)
        )

    def finish_session(self, session_id: str, reason: str) -> None:
        """The first reason stays."""
        self._connection.execute(
            "UPDATE sessions SET finished_at = ?, finish_reason = ? "
            "WHERE session_id = ? AND finished_at IS NULL",
            (time.time(), reason, session_id),
        )

    def list_session_ids(self, *, limit: int, offset: int) -> list[str]:
        """Newest first."""
        rows = self._connection.execute(
            "SELECT session_id FROM sessions ORDER BY created_at DESC, session_id LIMIT ? OFFSET ?",
            (limit, offset),
        )
        return [row["session_id"] for row in rows]

    def list_idle_session_ids(self, seen_before: float) -> list[str]:
        """Sessions that have not ended and were last heard of before that time."""
        rows = self._connection.execute(
            "SELECT session_id FROM sessions WHERE finished_at IS NULL AND last_seen_at < ?",
            (seen_before,),
        )
        return [row["session_id"] for row in rows]

    # --- runs ---

    def add_run(
        self,
        model_id: str,
        session_id: str,
        base_model: str,
        lora: LoraConfig,
        user_metadata: Mapping[str, Any],
    ) -> None:
        now = time.time()
        self._connection.execute(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "lora_rank = excluded.lora_rank, last_request_at = excluded.last_request_at",
            (
                model_id,
                session_id,
                base_model,
                now,
                now,
                lora.lora_rank,
                lora.train_attn,
                lora.train_mlp,
                lora.train_unembed,
                dump_metadata(user_metadata),
            ),
        )

    def get_run(self, model_id: str) -> RunRecord:
        """Raises NotFoundError."""
        row = self._fetch_one("SELECT * FROM runs WHERE model_id = ?", model_id)
        if row is None:
            raise NotFoundError(f"training run {model_id!r} does not exist")
        return run_from_row(row)

    def touch_run(self, model_id: str) -> None:
        self._connection.execute(
            "UPDATE runs SET last_request_at = ? WHERE model_id = ?", (time.time(), model_id)
        )

    def list_runs(self, *, limit: int, offset: int) -> tuple[list[RunRecord], int]:
        """A page, most recently used first, and how many there are in all."""
        rows = self._connection.execute(
            "SELECT * FROM runs ORDER BY last_request_at DESC, model_id LIMIT ? OFFSET ?",
            (limit, offset),
        )
        return [run_from_row(row) for row in rows], self._count("SELECT count(*) FROM runs")

    def delete_run(self, model_id: str) -> None:
        """With its checkpoints' records. The files are removed later, when nothing uses them."""
        self._connection.execute("BEGIN")
        self._connection.execute("DELETE FROM checkpoints WHERE model_id = ?", (model_id,))
        self._connection.execute("DELETE FROM runs WHERE model_id = ?", (model_id,))
        self._connection.execute("COMMIT")

    def list_run_ids_of_session(self, session_id: str) -> list[str]:
        rows = self._connection.execute(
            "SELECT model_id FROM runs WHERE session_id = ? ORDER BY created_at", (session_id,)
        )
        return [row["model_id"] for row in rows]

    # --- checkpoints ---

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replaces one of the same path."""
        path = checkpoint.path
        self._connection.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                path.model_id,
                path.kind,
                path.name,
                checkpoint.version,
                checkpoint.directory,
                checkpoint.created_at,
                checkpoint.size_bytes,
                checkpoint.public,
                checkpoint.expires_at,
                dump_metadata(checkpoint.user_metadata),
            ),
        )

    def find_checkpoint(self, path: TinkerPath) -> Checkpoint | None:
        row = self._fetch_one(
            "SELECT * FROM checkpoints WHERE model_id = ? AND kind = ? AND name = ? "
            "AND (expires_at IS NULL OR expires_at > ?)",
            path.model_id,
            path.kind,
            path.name,
            time.time(),
        )
        return checkpoint_from_row(row) if row else None

    def get_checkpoint(self, path: TinkerPath) -> Checkpoint:
        """Raises NotFoundError."""
        checkpoint = self.find_checkpoint(path)
        if checkpoint is None:
            raise NotFoundError(f"checkpoint {path} does not exist")
        return checkpoint

    def delete_checkpoint(self, path: TinkerPath) -> None:
        """Raises NotFoundError. The files are removed later, when nothing uses them."""
        self.get_checkpoint(path)
        self._connection.execute(
            "DELETE FROM checkpoints WHERE model_id = ? AND kind = ? AND name = ?",
            (path.model_id, path.kind, path.name),
        )

    def set_checkpoint_public(self, path: TinkerPath, public: bool) -> None:
        self._connection.execute(
            "UPDATE checkpoints SET public = ? WHERE model_id = ? AND kind = ? AND name = ?",
            (public, path.model_id, path.kind, path.name),
        )

    def set_checkpoint_expiry(self, path: TinkerPath, expires_at: float | None) -> None:
        self._connection.execute(
            "UPDATE checkpoints SET expires_at = ? WHERE model_id = ? AND kind = ? AND name = ?",
            (expires_at, path.model_id, path.kind, path.name),
        )

    def delete_expired_checkpoints(self) -> None:
        self._connection.execute("DELETE FROM checkpoints WHERE expires_at <= ?", (time.time(),))

    def list_checkpoints(
        self, *, model_id: str | None = None, limit: int = -1, offset: int = 0
    ) -> tuple[list[Checkpoint], int]:
        """A page, newest first, of one run's or all, and how many there are in all."""
        live = "(expires_at IS NULL OR expires_at > :now) AND (:model_id IS NULL OR model_id = :model_id)"
        values = {"now": time.time(), "model_id": model_id, "limit": limit, "offset": offset}
        rows = self._connection.execute(
            f"SELECT * FROM checkpoints WHERE {live} "
            "ORDER BY created_at DESC, name LIMIT :limit OFFSET :offset",
            values,
        )
        total: int = self._connection.execute(
            f"SELECT count(*) FROM checkpoints WHERE {live}", values
        ).fetchone()[0]
        return [checkpoint_from_row(row) for row in rows], total

    # --- sampling sessions ---

    def put_sampling_session(self, session: SamplingSession) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO sampling_sessions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                session.sampling_session_id,
                session.session_id,
                session.base_model,
                session.model_path,
                session.adapter and session.adapter.name,
                session.adapter and str(session.adapter.directory),
                time.time(),
            ),
        )

    def get_sampling_session(self, sampling_session_id: str) -> SamplingSession:
        """Raises NotFoundError."""
        row = self._fetch_one(
            "SELECT * FROM sampling_sessions WHERE sampling_session_id = ?", sampling_session_id
        )
        if row is None:
            raise NotFoundError(f"sampling session {sampling_session_id!r} does not exist")
        return sampling_session_from_row(row)

    def list_sampler_ids_of_session(self, session_id: str) -> list[str]:
        rows = self._connection.execute(
            "SELECT sampling_session_id FROM sampling_sessions WHERE session_id = ? "
            "ORDER BY created_at",
            (session_id,),
        )
        return [row["sampling_session_id"] for row in rows]

    def list_directories_in_use(self) -> set[str]:
        """Directories of checkpoints, and of adapters that live sessions sample."""
        rows = self._connection.execute(
            "SELECT directory FROM checkpoints UNION "
            "SELECT adapter_directory FROM sampling_sessions JOIN sessions USING (session_id) "
            "WHERE adapter_directory IS NOT NULL AND finished_at IS NULL"
        )
        return {row["directory"] for row in rows}

    def _fetch_one(self, statement: str, *values: Any) -> sqlite3.Row | None:
        return self._connection.execute(statement, values).fetchone()

    def _count(self, statement: str) -> int:
        return self._connection.execute(statement).fetchone()[0]


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
