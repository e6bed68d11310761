"""What a run is: frozen dataclasses whose field docstrings are the help of the command line."""
