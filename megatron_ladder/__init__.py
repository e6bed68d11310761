"""megatron_ladder: pretraining, conversion and generation for Ladder Residual transformers.

Importing the package imports neither torch, deepspeed nor apex; each module imports what it needs.
"""

__version__ = "0.1.0"
