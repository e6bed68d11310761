"""Plans the layout of a run and predicts its time."""
