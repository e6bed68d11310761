"""What a run that continues may do otherwise than the run that saved: the learning rate and the optimizer's numbers.

The schedule belongs to the loss curve. So it is what it was, unless the user says that it is to change: another value
on the command line is refused with the two flags that decide it, whose names and meaning are Megatron's. --train-iters
alone may change: the decay then still ends where it did.
"""

from dataclasses import asdict, replace
from typing import Any

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.config.run import RunConfig
from megatron_ladder.flags import flag_name

SCHEDULE = ("lr", "lr_warmup_iters", "lr_decay_style")
DECAY = ("min_lr", "lr_decay_iters")
"""Of no meaning to the style `constant`."""
WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_style")
"""Of a meaning to the style `WSD` alone."""
ADAMW = ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")


def resumed_run(run: RunConfig, checkpoint: Checkpoint, mistakes: list[str]) -> RunConfig:
    """The run with the schedule that it continues with; appends a line to `mistakes` for each refused change."""
    options, stored = run.checkpoint, checkpoint.manifest.get("run", {})
    if run.loads_only_weights:
        return run
    if options.load_optim and not checkpoint.tensors("exp_avg"):
        mistakes.append(
            f"--load {checkpoint.directory}: holds weights and no optimizer: give --finetune, or --no-load-optim"
        )
    if options.override_opt_param_scheduler or "optimizer" not in stored:
        return run
    given = asdict(run.optimizer)
    train_iters = stored.get("training", {}).get("train_iters", run.training.train_iters)
    theirs = _in_full(given | stored["optimizer"], train_iters)
    if options.use_checkpoint_opt_param_scheduler:
        return replace(run, optimizer=replace(run.optimizer, **theirs))
    ours = _in_full(given, theirs["lr_decay_iters"])
    compared = [*SCHEDULE, *ADAMW]
    if not ours["lr_decay_style"] == theirs["lr_decay_style"] == "constant":
        compared += DECAY
    if "WSD" in (ours["lr_decay_style"], theirs["lr_decay_style"]):
        compared += WSD
    mistakes += [
        f"{flag_name(name)} {ours[name]}: {checkpoint.directory} was trained with {theirs[name]}: give "
        "--override-opt-param-scheduler to change it, or --use-checkpoint-opt-param-scheduler to keep what it was"
        for name in compared
        if ours[name] != theirs[name]
    ]
    return replace(run, optimizer=replace(run.optimizer, **ours))


def schedule_note(run: RunConfig, checkpoint: Checkpoint) -> str | None:
    """What the user should know of the schedule of a run that is longer or shorter than the one that saved."""
    stored = checkpoint.manifest.get("run", {}).get("training", {}).get("train_iters")
    ends = run.optimizer.lr_decay_iters
    if stored in (None, run.training.train_iters) or run.optimizer.lr_decay_style == "constant" or ends is None:
        return None
    return (
        f"--train-iters {run.training.train_iters}, and the checkpoint was trained for {stored}: the decay of the "
        f"learning rate ends at iteration {ends}; --lr-decay-iters with --override-opt-param-scheduler moves it"
    )


def _in_full(optimizer: dict[str, Any], train_iters: int) -> dict[str, Any]:
    """The values of a schedule, those not left open that follow from others."""
    values = {name: optimizer[name] for name in (*SCHEDULE, *DECAY, *WSD, *ADAMW)}
    if values["lr_decay_iters"] is None:
        values["lr_decay_iters"] = train_iters
    if values["lr_wsd_decay_iters"] is None:
        values["lr_wsd_decay_iters"] = max(1, values["lr_decay_iters"] // 10)
    return values
