"""Conversion between Hugging Face directories and training checkpoints."""
