"""AdamW and Muon, their parameter groups, and the learning rate as a pure function of the iteration."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ladder.blueprint.tensors import Role
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine.muon import ORTHOGONAL, MuonWithAdamW
from megatron_ladder.engine.state import ZeroOptimizer
from megatron_ladder.errors import UserError
from megatron_ladder.model.operations import find_in_apex
from megatron_ladder.parallel.layout import parameter_sections


def parameter_groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return two groups: parameters that decay, and vectors, which do not.

    With Muon, the matrices of the layers form another group, before the others that decay.
    """
    # A slice without sections is padding of the vocabulary.
    roles = {
        parameter: sections[0].tensor.role if sections else Role.EMBEDDING
        for parameter, sections in parameter_sections(model)
    }
    decaying = [parameter for parameter in model.parameters() if roles[parameter] is not Role.VECTOR]
    vectors = [parameter for parameter in model.parameters() if roles[parameter] is Role.VECTOR]
    decay = {"weight_decay": config.weight_decay}
    no_decay = {"params": vectors, "weight_decay": 0.0}
    if config.optimizer != "muon":
        return [{"params": decaying, **decay}, no_decay]
    matrices = [parameter for parameter in decaying if roles[parameter] is Role.MATRIX]
    others = [parameter for parameter in decaying if roles[parameter] is not Role.MATRIX]
    groups = [
        {"params": matrices, ORTHOGONAL: True, **decay},
        {"params": others, ORTHOGONAL: False, **decay},
    ]
    return [*(group for group in groups if group["params"]), {ORTHOGONAL: False, **no_decay}]


def build_optimizer(
    groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    device: torch.device,
    offload: bool = False,
    apex_counts_steps: bool = True,
    muon_dtype: torch.dtype = torch.float32,
) -> tuple[torch.optim.Optimizer, str]:
    """Return the optimizer and its description; raises UserError if apex was requested, but cannot be used.

    With `offload` torch's fused kernel runs on the host, in one pass over the memory. `apex_counts_steps` is False if
    the engine updates the parts of a group one after another (ZeRO-3): apex has one step count per group, which would
    grow with every part. Muon orthogonalises matrices in `muon_dtype`.
    """
    settings: dict[str, Any] = dict(lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    wanted = config.optimizer_implementation
    fused = offload or device.type == "cuda"
    if config.optimizer == "muon":
        optimizer = MuonWithAdamW(groups, config, muon_dtype, fused=fused, **settings)
        name = str(muon_dtype).removeprefix("torch.")
        return optimizer, f"torch; Muon in {name} for the matrices of the layers"
    if offload:
        return torch.optim.AdamW(list(groups), fused=True, **settings), "torch, on the host"
    if wanted == "torch" or (wanted == "auto" and not (fused and apex_counts_steps)):
        return torch.optim.AdamW(list(groups), fused=fused, **settings), "torch"
    fused_adam, reason = find_fused_adam(config, device)
    if fused_adam is not None:
        return fused_adam(list(groups), adam_w_mode=True, **settings), "apex FusedAdam"
    return torch.optim.AdamW(list(groups), fused=fused, **settings), f"torch ({reason})"


def distribute_matrices(optimizer: ZeroOptimizer, world: CommGroup) -> None:
    """Let the ranks divide the updates of the tensors that train among them; all must call it."""
    if isinstance(optimizer.base, MuonWithAdamW):
        optimizer.base.distribute(optimizer.spans(), world)


def find_fused_adam(config: OptimizerConfig, device: torch.device) -> tuple[Any | None, str]:
    """Return apex's AdamW, or None and the reason; raises UserError if --optimizer-implementation apex requires it."""
    fused_adam, reason = find_in_apex("apex.optimizers", "FusedAdam", "amp_C", device)
    if fused_adam is None and config.optimizer_implementation == "apex":
        raise UserError(f"--optimizer-implementation apex: {reason}; use --optimizer-implementation torch")
    return fused_adam, reason


def learning_rate(config: OptimizerConfig, train_iters: int, iteration: int) -> float:
    """Return the rate of an iteration, the first of which is 1, in a run of `train_iters`: warm-up, then decay.

    The formulas are those of Megatron-LM's `OptimizerParamScheduler.get_lr`, with one difference: a step uses the rate
    of its own iteration. (Megatron sets the rate after a step, so the first step of a warm-up has the rate 0.)
    """
    warmup = config.lr_warmup_iters
    config = config.completed(train_iters)
    if iteration <= warmup:
        return config.lr if iteration == warmup else config.lr * iteration / warmup
    style: str = config.lr_decay_style
    if style == "constant":
        return config.lr
    last = config.lr_decay_iters or train_iters
    if iteration > last:
        return config.min_lr
    if style == "inverse-square-root":
        return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1) / max(iteration, 1)))
    first = warmup
    if style == "WSD":
        style, first = config.lr_wsd_decay_style, last - (config.lr_wsd_decay_iters or 0)
    done = max(0, iteration - first) / (last - first)
    match style:
        case "exponential":
            remaining = 2.0 * math.pow(0.5, done) - 1.0
        case "linear":
            remaining = 1.0 - done
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * done))
        case "minus_sqrt":
            remaining = 1.0 - math.sqrt(done)
    return config.min_lr + remaining * (config.lr - config.min_lr)
