"""The only package that imports DeepSpeed: engines, their optimizer state, and the derived configuration."""
