"""Configuration of a training run: frozen dataclasses whose field docstrings are the help of the command line."""
