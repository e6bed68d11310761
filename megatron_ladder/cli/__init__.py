"""Importable mains of the programs; tools/*.py only call them."""
