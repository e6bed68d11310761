"""The description of a model, without torch: sizes, wiring, tensors, FLOPs and bytes."""
