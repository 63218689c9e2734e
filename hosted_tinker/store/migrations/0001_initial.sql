-- Times are seconds since the epoch, UTC. user_metadata and tags are JSON.

CREATE TABLE sessions (
    session_id    TEXT PRIMARY KEY,
    created_at    REAL NOT NULL,
    last_seen_at  REAL NOT NULL,
    finished_at   REAL,
    finish_reason TEXT,
    display_name  TEXT,
    user_metadata TEXT NOT NULL,
    tags          TEXT NOT NULL,
    sdk_version   TEXT
);

CREATE TABLE runs (
    model_id        TEXT PRIMARY KEY,
    session_id      TEXT NOT NULL REFERENCES sessions,
    base_model      TEXT NOT NULL,
    created_at      REAL NOT NULL,
    last_request_at REAL NOT NULL,
    lora_rank       INTEGER NOT NULL,
    train_attn      INTEGER NOT NULL,
    train_mlp       INTEGER NOT NULL,
    train_unembed   INTEGER NOT NULL,
    user_metadata   TEXT NOT NULL
);

-- kind: training or sampler. version is unique for ever: engines cache adapters under it.
-- directory is relative to the state directory.
CREATE TABLE checkpoints (
    model_id      TEXT NOT NULL REFERENCES runs,
    kind          TEXT NOT NULL,
    name          TEXT NOT NULL,
    version       TEXT NOT NULL,
    directory     TEXT NOT NULL,
    created_at    REAL NOT NULL,
    size_bytes    INTEGER NOT NULL,
    public        INTEGER NOT NULL,
    expires_at    REAL,
    user_metadata TEXT NOT NULL,
    PRIMARY KEY (model_id, kind, name)
);

-- An adapter's directory is that of a checkpoint, or of a snapshot that has no name of its own.
CREATE TABLE sampling_sessions (
    sampling_session_id TEXT PRIMARY KEY,
    session_id          TEXT NOT NULL REFERENCES sessions,
    base_model          TEXT NOT NULL,
    model_path          TEXT,
    adapter_name        TEXT,
    adapter_directory   TEXT,
    created_at          REAL NOT NULL
);
CREATE INDEX sampling_sessions_by_session ON sampling_sessions (session_id);
