"""Text from a trained model, at any tensor-parallel size. The decode loop is in `engine`."""
