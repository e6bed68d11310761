"""Hugging Face directories in and out; needs no process group, no GPU and no model in memory."""
