-- step counts the optimizer steps of the run; null for checkpoints that were saved before this script.
ALTER TABLE checkpoints ADD COLUMN step INTEGER;

-- The newest weights of a run that can be sampled under its id. directory is relative to the state
-- directory.
CREATE TABLE run_weights (
    model_id   TEXT PRIMARY KEY REFERENCES runs,
    version    TEXT NOT NULL,
    directory  TEXT NOT NULL,
    step       INTEGER NOT NULL,
    created_at REAL NOT NULL
);
