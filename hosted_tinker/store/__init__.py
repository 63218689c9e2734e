"""What outlives the process: metadata in SQLite, checkpoints in directories."""
