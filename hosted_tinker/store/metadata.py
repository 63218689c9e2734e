"""Every SQL statement of the server, as methods that take and return `records`."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from hosted_tinker.errors import NotFoundError, UserError
from hosted_tinker.store.records import (
    Checkpoint,
    RunRecord,
    RunWeights,
    SamplingSession,
    Session,
    checkpoint_from_row,
    dump_metadata,
    run_from_row,
    run_weights_from_row,
    sampling_session_from_row,
    session_from_row,
)
from hosted_tinker.tinker_path import TinkerPath
from hosted_tinker.types import LoraConfig


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
        return session_from_row(row)

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

    def has_run(self, model_id: str) -> bool:
        return self._fetch_one("SELECT 1 FROM runs WHERE model_id = ?", model_id) is not None

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
        self._connection.execute("DELETE FROM run_weights WHERE model_id = ?", (model_id,))
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
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                checkpoint.step,
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

    def find_checkpoint_of_version(self, model_id: str, version: str) -> Checkpoint | None:
        row = self._fetch_one(
            "SELECT * FROM checkpoints WHERE model_id = ? AND version = ? "
            "AND (expires_at IS NULL OR expires_at > ?)",
            model_id,
            version,
            time.time(),
        )
        return checkpoint_from_row(row) if row else None

    # --- the newest weights of runs ---

    def put_run_weights(self, weights: RunWeights) -> None:
        """Replaces the run's earlier ones."""
        self._connection.execute(
            "INSERT OR REPLACE INTO run_weights (model_id, version, directory, step, created_at) "
            "VALUES (?, ?, ?, ?, ?)",
            (
                weights.model_id,
                weights.version,
                weights.directory,
                weights.step,
                weights.created_at,
            ),
        )

    def find_run_weights(self, model_id: str) -> RunWeights | None:
        row = self._fetch_one("SELECT * FROM run_weights WHERE model_id = ?", model_id)
        return run_weights_from_row(row) if row else None

    def list_run_weights(self) -> list[RunWeights]:
        """Of the run created last first."""
        rows = self._connection.execute(
            "SELECT run_weights.* FROM run_weights JOIN runs USING (model_id) "
            "ORDER BY runs.created_at DESC, model_id"
        )
        return [run_weights_from_row(row) for row in rows]

    def mark_run_weights_outdated(self, model_id: str) -> None:
        """The run has newer weights, which are not stored yet."""
        self._connection.execute(
            "UPDATE run_weights SET is_current = 0 WHERE model_id = ? AND is_current", (model_id,)
        )

    def delete_outdated_run_weights(self) -> None:
        """For a server that starts: what was newer is lost, and the rest must not pass for it."""
        self._connection.execute("DELETE FROM run_weights WHERE NOT is_current")

    def delete_run_weights(self, model_id: str) -> None:
        """The files are removed later, when nothing uses them."""
        self._connection.execute("DELETE FROM run_weights WHERE model_id = ?", (model_id,))

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
        """Directories of checkpoints, of runs' newest weights, and of adapters of live sessions."""
        rows = self._connection.execute(
            "SELECT directory FROM checkpoints UNION SELECT directory FROM run_weights UNION "
            "SELECT adapter_directory FROM sampling_sessions JOIN sessions USING (session_id) "
            "WHERE adapter_directory IS NOT NULL AND finished_at IS NULL"
        )
        return {row["directory"] for row in rows}

    def _fetch_one(self, statement: str, *values: Any) -> sqlite3.Row | None:
        return self._connection.execute(statement, values).fetchone()

    def _count(self, statement: str) -> int:
        return self._connection.execute(statement).fetchone()[0]
