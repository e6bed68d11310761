"""Training checkpoints on disk; `format` describes the files."""
