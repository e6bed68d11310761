"""Grids of trainings that are compared: at equal tokens, at equal time, and after an adaptation."""
