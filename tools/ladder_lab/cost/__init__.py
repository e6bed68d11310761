"""Predictions of memory and time by arithmetic."""
