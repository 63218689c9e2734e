-- 0 once the run has newer weights, which are in the trainer's memory only.
ALTER TABLE run_weights ADD COLUMN is_current INTEGER NOT NULL DEFAULT 1;
