"""Text to token files, token files to batches: tokenizers, .bin/.idx, the order of samples, the loader."""
