"""What is on disk of a training run, and how it gets there: see `format`."""
