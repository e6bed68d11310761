"""A run: its inputs, its set-up, its step and its loop. Start with `loop.py`."""
