"""Layers that own a slice of a weight."""
