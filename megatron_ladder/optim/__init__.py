"""What updates the weights, and by how much."""
