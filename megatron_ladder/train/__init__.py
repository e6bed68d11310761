"""Training runs: inputs, set-up, step and loop. Start with `loop.py`."""
