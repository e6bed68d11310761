"""What a model is, without torch: its sizes, its wiring, its tensors and what they cost."""
