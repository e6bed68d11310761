"""Studies: grids of training runs with several wirings, and adaptations of standard models."""
