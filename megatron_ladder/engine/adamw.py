"""AdamW by torch, or by NVIDIA apex where it is asked for and there."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ladder.config.training import OptimizerConfig
from megatron_ladder.errors import UserError
from megatron_ladder.parallel.apex import find_in_apex


def build_adamw(
    groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    device: torch.device,
    offload: bool = False,
    apex_counts_steps: bool = True,
) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer, and a sentence that says which implementation it is and why.

    Args:
        offload: whether it runs on the host, whatever the device; torch's fused kernel then, in one pass over memory.
        apex_counts_steps: False where the engine steps the parts of a group one after another (ZeRO-3): apex has one
            count of steps for a group, which would grow with each part.

    Raises:
        UserError: apex was asked for and is not NVIDIA's, is missing, or there is no CUDA device.
    """
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    wanted = config.optimizer_implementation
    fused = offload or device.type == "cuda"
    if offload:
        return torch.optim.AdamW(list(groups), fused=True, **settings), "torch, on the host"
    if wanted == "torch" or (wanted == "auto" and not (fused and apex_counts_steps)):
        return torch.optim.AdamW(list(groups), fused=fused, **settings), "torch"
    fused_adam, reason = find_in_apex("apex.optimizers", "FusedAdam", "amp_C", device)
    if fused_adam is not None:
        return fused_adam(list(groups), adam_w_mode=True, **settings), "apex FusedAdam"
    if wanted == "apex":
        raise UserError(f"--optimizer-implementation apex: {reason}; use --optimizer-implementation torch")
    return torch.optim.AdamW(list(groups), fused=fused, **settings), f"torch ({reason})"
