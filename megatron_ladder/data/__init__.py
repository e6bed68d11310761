"""Text to token files, token files to batches: .bin/.idx, the order of samples, the loader."""
