"""The mathematics of one model. Start with `wiring.py`, then `stack.py`."""
