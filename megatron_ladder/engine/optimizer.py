"""Builds optimizers and their parameter groups; the learning rate as a pure function of the iteration."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.blueprint.specs import Role
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine.muon import MuonWithAdamW
from megatron_ladder.engine.state import GROUP_MOMENTS, ZeroOptimizer
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.model.operations import find_in_apex
from megatron_ladder.parallel.layout import parameter_sections


def parameter_groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return groups of parameters with the same weight decay and moments, the last one of vectors, which do not decay.

    Matrices of layers come first if their moments differ from those of others that decay.
    """
    kind = optimizer_kind(config.optimizer)
    roles = [role for role in Role if role is not Role.STATE]
    # A slice without sections is padding of the vocabulary.
    role_of = {
        parameter: sections[0].tensor.role if sections else Role.EMBEDDING
        for parameter, sections in parameter_sections(model)
    }
    groups: list[dict[str, Any]] = []
    for decays, moments in dict.fromkeys((role.decays, kind.moments_of(role)) for role in roles):
        alike = [role for role in roles if (role.decays, kind.moments_of(role)) == (decays, moments)]
        members = [parameter for parameter in model.parameters() if role_of[parameter] in alike]
        if members or not decays:
            weight_decay = config.weight_decay if decays else 0.0
            groups.append({"params": members, GROUP_MOMENTS: moments, "weight_decay": weight_decay})
    return groups


class Updates(NamedTuple):
    """How parameters are updated."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    """The precision of the model."""
    offload: bool = False
    """On the host, where torch's fused kernel needs one pass over the memory."""
    in_parts: bool = False
    """The parts of a group one after another (ZeRO-3). Apex would count each part as a step of the group."""


Groups = Sequence[dict[str, Any]]


def build_optimizer(groups: Groups, config: OptimizerConfig, updates: Updates) -> tuple[torch.optim.Optimizer, str]:
    """Return the optimizer and its description; raises UserError if apex was requested, but cannot be used."""
    return _BUILDERS[optimizer_kind(config.optimizer).name](groups, config, updates)


def _adam_settings(config: OptimizerConfig, updates: Updates) -> dict[str, Any]:
    fused = updates.offload or updates.device.type == "cuda"
    return dict(lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=fused)


def _build_adamw(groups: Groups, config: OptimizerConfig, updates: Updates) -> tuple[torch.optim.Optimizer, str]:
    settings = _adam_settings(config, updates)
    wanted = config.optimizer_implementation
    place = "torch, on the host" if updates.offload else "torch"
    if updates.offload or wanted == "torch" or (wanted == "auto" and (updates.in_parts or not settings["fused"])):
        return torch.optim.AdamW(list(groups), **settings), f"AdamW by {place}"
    fused_adam, reason = find_fused_adam(config, updates.device)
    if fused_adam is None:
        return torch.optim.AdamW(list(groups), **settings), f"AdamW by torch ({reason})"
    del settings["fused"]
    return fused_adam(list(groups), adam_w_mode=True, **settings), "AdamW by apex FusedAdam"


def _build_muon(groups: Groups, config: OptimizerConfig, updates: Updates) -> tuple[torch.optim.Optimizer, str]:
    optimizer = MuonWithAdamW(groups, config, updates.dtype, **_adam_settings(config, updates))
    precision = str(updates.dtype).removeprefix("torch.")
    return optimizer, f"AdamW by torch; Muon in {precision} for the matrices of the layers"


_BUILDERS: dict[str, Callable[[Groups, OptimizerConfig, Updates], tuple[torch.optim.Optimizer, str]]] = {
    "adamw": _build_adamw,
    "muon": _build_muon,
}


def distribute_matrices(optimizer: ZeroOptimizer, world: CommGroup) -> None:
    """Let the ranks divide the updates of the tensors that train among them; all must call it."""
    if isinstance(optimizer.base, MuonWithAdamW):
        optimizer.base.distribute(optimizer.spans(), world)


def find_fused_adam(config: OptimizerConfig, device: torch.device) -> tuple[Any | None, str]:
    """Return apex's AdamW, or None and the reason; raises UserError if --optimizer-implementation apex requires it."""
    fused_adam, reason = find_in_apex("apex.optimizers", "FusedAdam", "amp_C", device)
    if fused_adam is None and config.optimizer_implementation == "apex":
        use_torch = "; use {optimizer_implementation} torch"
        raise UserError(Problem({"optimizer_implementation": "apex"}, "{}: {why}" + use_torch, why=reason))
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
