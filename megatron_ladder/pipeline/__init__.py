"""The model's stack cut into stages, run by DeepSpeed's pipeline engine."""
