"""The mathematics of one model. Start with `sub_block.py`, the rule of all wirings."""
