"""Sizes, wirings and recipe of the paper's from-scratch runs (arXiv 2501.06589), and of additional wirings.

    python examples/paper/runs.py --size 1.2b --wiring ladder

prints the flags of pretrain_ladder.py for a run, one word per line; train.sh adds paths. It does not import torch.

The authors trained 1.2B and 3.5B as standard, parallel and ladder with configs/research/ladder-residual in
github.com/IBM/dolomite-engine (commit d0ee186). These files leave some settings to the defaults of that program.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "tools")]

from ladder_lab.bench.sizes import SIZES as SHAPES  # noqa: E402
from ladder_lab.wirings import NAMED_WIRINGS, NamedWiring  # noqa: E402
from megatron_ladder.blueprint.model import ModelConfig  # noqa: E402
from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.errors import raise_user_errors, run_program  # noqa: E402

PUBLISHED, DEFAULT, OURS = "authors' files", "their program's default", "ours"
MOST_AT_ONCE = 8
"""Samples of the largest micro-batch, as in the planner."""


@dataclass(frozen=True)
class Size:
    """A model and its micro-batch on GPUs of 80 GB."""

    shape: ModelConfig
    micro_batch: int
    """Samples per GPU and micro-batch, without tensor parallelism."""
    in_the_paper: tuple[str, ...]
    """Wirings of this model in the paper."""


SIZES: Mapping[str, Size] = {
    "1.2b": Size(SHAPES["paper-1.2b"], 4, ("standard", "parallel", "ladder")),
    "1.5b": Size(SHAPES["paper-1.5b"], 4, ("ladder",)),
    "3.5b": Size(SHAPES["paper-3.5b"], 2, ("standard", "parallel", "ladder")),
    "4.5b": Size(SHAPES["paper-4.5b"], 2, ("ladder",)),
    "3.5b-tp8": Size(SHAPES["paper-3.5b-tp8"], 2, ()),
    "4.5b-tp8": Size(SHAPES["paper-4.5b-tp8"], 2, ()),
}
"""1.5b and 4.5b are the ladders of 52 layers. -tp8: 32 heads of 72 instead of 36 of 64, as in the authors' inference
program, because 8 tensor-parallel GPUs cannot share 36 heads; the authors trained with 36."""

TINY = Size(
    replace(
        SHAPES["small-train"],
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=257,
    ),
    2,
    (),
)
"""A toy model to try the scripts; its tokens are bytes."""
ALL_SIZES: Mapping[str, Size] = {**SIZES, "tiny": TINY}

WIRINGS: Mapping[str, NamedWiring] = {
    name: NAMED_WIRINGS[name]
    for name in (
        "standard",
        "parallel",
        "ladder",
        "ladder-parallel",
        "staleness-2",
        "hybrid",
        "desync-2x",
        "desync-4x",
    )
}
"""The three wirings that the authors trained from scratch, and five more."""


class Setting(NamedTuple):
    """A flag of the recipe."""

    flag: str
    value: str
    """Empty for a switch."""
    source: str
    """Origin of the value."""
    tiny: str | None = None
    """Value for the toy model, if different."""


RECIPE = (
    Setting("--seq-length", "2048", PUBLISHED, tiny="64"),
    Setting("--global-batch-size", "2048", PUBLISHED, tiny="4"),
    Setting("--train-iters", "25000", PUBLISHED, tiny="12"),
    Setting("--lr", "3e-4", PUBLISHED),
    Setting("--lr-decay-style", "cosine", PUBLISHED),
    Setting("--lr-warmup-iters", "2000", PUBLISHED, tiny="2"),
    Setting("--min-lr", "3e-5", DEFAULT),
    Setting("--adam-beta1", "0.9", PUBLISHED),
    Setting("--adam-beta2", "0.95", PUBLISHED),
    Setting("--adam-eps", "1e-10", PUBLISHED),
    Setting("--weight-decay", "0.1", PUBLISHED),
    Setting("--clip-grad", "1", DEFAULT),
    Setting("--init-method-std", "0.02", PUBLISHED),
    Setting("--norm-epsilon", "1e-5", PUBLISHED),
    Setting("--rotary-base", "10000", PUBLISHED),
    Setting("--tie-embeddings", "", DEFAULT),
    Setting("--bf16", "", PUBLISHED),
    Setting("--zero-stage", "1", OURS),
    Setting("--streaming-shuffle-buffer", "65536", OURS, tiny="8"),
    Setting("--eval-interval", "1000", OURS, tiny="6"),
    Setting("--eval-iters", "5", OURS, tiny="2"),
    Setting("--log-interval", "10", PUBLISHED, tiny="2"),
    Setting("--save-interval", "500", OURS, tiny="6"),
    Setting("--keep-last-n-checkpoints", "2", OURS),
    Setting("--save-retain-interval", "5000", OURS),
    Setting("--async-save", "", OURS),
    # A stream from the hub can stall for longer than the default of 120 s.
    Setting("--distributed-timeout-seconds-after-first-step", "600", OURS),
)
"""Output projections are initialised with the standard deviation over sqrt(2 x layers), as in the authors' runs."""


def training_flags(size: Size, wiring: str, tensor_parallel: int) -> list[str]:
    """Return the flags of pretrain_ladder.py for a run, without files and directories."""
    shape = size.shape
    words = [
        "--num-layers",
        str(shape.num_layers),
        "--hidden-size",
        str(shape.hidden_size),
        "--ffn-hidden-size",
        str(shape.ffn_hidden_size),
        "--num-attention-heads",
        str(shape.num_attention_heads),
        "--num-key-value-heads",
        str(shape.num_key_value_heads),
        "--vocab-size",
        str(shape.vocab_size),
    ]
    words += WIRINGS[wiring].flags(shape, tensor_parallel)
    for setting in RECIPE:
        value = setting.tiny if size is TINY and setting.tiny is not None else setting.value
        words += [setting.flag, value] if value else [setting.flag]
    words += ["--tensor-model-parallel-size", str(tensor_parallel)]
    words += ["--micro-batch-size", str(min(MOST_AT_ONCE, size.micro_batch * tensor_parallel))]
    if tensor_parallel > 1 and WIRINGS[wiring].shares_stream:
        words.append("--sequence-parallel")
    return words


@dataclass(frozen=True)
class RunsOptions:
    """Run."""

    wiring: str
    """standard, parallel, ladder, ladder-parallel, staleness-2 (ladder two sub-blocks late), hybrid (the upper half
    ladder), or desync-2x and desync-4x (one stream per GPU, summed after every second or fourth sub-block)."""
    size: str = "1.2b"
    """1.2b, 1.5b (1.2b with 52 layers), 3.5b, 4.5b (3.5b with 52 layers), 3.5b-tp8 and 4.5b-tp8 (32 heads instead of
    36), or tiny."""
    tp: int = 1
    """Tensor-parallel GPUs of a model. desync-2x and desync-4x need 2 or more; the number is part of the model."""


def tensor_parallel_problems(size: str, wiring: str, tensor_parallel: int) -> Iterator[str]:
    """Yield one line for each reason that a model cannot run on so many tensor-parallel GPUs."""
    heads, fewest = ALL_SIZES[size].shape.num_attention_heads, WIRINGS[wiring].fewest_ranks
    if tensor_parallel < fewest:
        yield (
            f"--tp {tensor_parallel}: expected {fewest} or more with --wiring {wiring}, which has one stream per GPU: "
            "choose --tp once, because the number is part of the model and cannot change later"
        )
    if heads % tensor_parallel:
        other = f"{size}-tp{tensor_parallel}"
        fix = f"use --size {other}" if other in SIZES else "use another --tp"
        yield f"--tp {tensor_parallel}: --size {size} has {heads} heads, which are not divisible by it: {fix}"


def main(argv: Sequence[str]) -> None:
    """Print the flags."""
    options: RunsOptions
    (options,) = parse_command_line(
        [RunsOptions], argv, program="runs.py", description="Flags of pretrain_ladder.py for a run of the paper."
    )
    errors = [
        f"--{name} {value}: expected one of {', '.join(known)}"
        for name, value, known in (("size", options.size, ALL_SIZES), ("wiring", options.wiring, WIRINGS))
        if value not in known
    ]
    if options.tp < 1:
        errors.append(f"--tp {options.tp}: expected 1 or more")
    raise_user_errors(errors or tensor_parallel_problems(options.size, options.wiring, options.tp))
    print(*training_flags(ALL_SIZES[options.size], options.wiring, options.tp), sep="\n")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)


if __name__ == "__main__":
    entry_point()
