"""Training throughput of one device: forward and backward of a micro-batch, against transformers and against the floor.

What can be reached at best is the time of the model's products alone, all at the rate of one large product on the same
device: the floor. It is measured in the same rounds as the models, so that a clock that falls under load falls for
all. Utilisation is the floor over the measured time: model FLOPs (`blueprint/flops.py`: 3 x forward, full scores)
over the time, as a share of the measured rate.

Our models are compiled as --compile-sub-blocks compiles them, which is how they train on many ranks; transformers'
Llama is compiled whole. No optimizer takes part.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.paired import PairedTimes, Verdict, measure
from megatron_ladder.lab.bench.variants import Variant, build_models
from megatron_ladder.model.compiled import compile_sub_blocks

TRANSFORMERS = "transformers"
PRODUCT = "product"
"""The way that measures the floor."""
PRODUCTS_AT_ONCE = 8
"""Between two looks at the clock; launching one takes time as well."""


@dataclass(frozen=True)
class Workload:
    """What every way computes."""

    config: ModelConfig
    """In any wiring."""
    sequence: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    backend: str | None
    """Of torch.compile; None does not compile."""
    matrix: int
    """Side of the square product that measures the rate."""

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.sequence * self.batch

    @property
    def flops(self) -> int:
        """Model FLOPs of one micro-batch, forward and backward."""
        return self.batch * ModelFlops(self.config, self.sequence).training


@dataclass(frozen=True)
class Row:
    """One way to train, at one length."""

    way: str
    sequence: int
    batch: int
    layers: int
    median_seconds: float
    """Forward and backward of one micro-batch."""
    tokens_per_second: float
    model_flops_per_second: float
    utilisation: float
    """Of the rate of one large product, measured in the same rounds; the median of paired ratios."""
    speed_over_transformers: float | None
    """Median of the rounds' paired ratios; None where transformers does not run."""
    spread: float
    """Distance of the quartiles of that ratio, or of the utilisation where there is none."""
    verdict: str


def ways(workload: Workload, variants: Sequence[Variant], with_transformers: bool) -> dict[str, Callable[[], object]]:
    """Everything to be timed, by name; our models share one set of weights."""
    alone = CommGroup.alone()
    models: dict[str, nn.Module] = {
        **build_models(
            list(variants), workload.config, ProcessMesh.single(), alone, alone, workload.dtype, workload.device
        )
    }
    if workload.backend is not None:
        for model in models.values():
            compile_sub_blocks(model, workload.backend)
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch, workload.sequence + 1)
    ids = torch.randint(0, workload.config.vocab_size, shape, generator=generator).to(workload.device)
    made: dict[str, Callable[[], object]] = {
        name: _training(model, lambda model=model: model(ids[:, :-1], ids[:, 1:]), workload)  # type: ignore[misc]
        for name, model in models.items()
    }
    if with_transformers:
        llama = transformers_llama(workload.config, workload.dtype, workload.device)
        compiled: Any = llama if workload.backend is None else torch.compile(llama, backend=workload.backend)
        tokens = ids[:, :-1].contiguous()
        made[TRANSFORMERS] = _training(llama, lambda: compiled(input_ids=tokens, labels=tokens).loss, workload)
    made[PRODUCT] = _product(workload)
    return made


def _training(model: nn.Module, loss: Callable[[], Tensor], workload: Workload) -> Callable[[], None]:
    """Forward and backward, to their end on the device."""
    model.train()

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss().backward()
        _finish(workload.device)

    return run


def _product(workload: Workload) -> Callable[[], None]:
    left, right = (
        torch.randn(workload.matrix, workload.matrix, dtype=workload.dtype, device=workload.device) for _ in range(2)
    )
    result = torch.empty_like(left)

    def run() -> None:
        for _ in range(PRODUCTS_AT_ONCE):
            torch.mm(left, right, out=result)
        _finish(workload.device)

    return run


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def transformers_llama(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """transformers' Llama of these sizes, with weights of its own."""
    transformers = importlib.import_module("transformers")
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
    )
    with device:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            theirs, dtype=dtype, attn_implementation="sdpa"
        )
    return model.to(device)


def check_transformers() -> None:
    """Raises a UserError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            "transformers is not installed: pip install 'transformers>=5.0,<6', or give --no-transformers"
        )


def rows(workload: Workload, times: PairedTimes) -> list[Row]:
    """A row for every way but the product."""
    return [_row(way, workload, times) for way in times.seconds if way != PRODUCT]


def _row(way: str, workload: Workload, times: PairedTimes) -> Row:
    # A floor's time is that of the product, scaled to the model's operations.
    scale = workload.flops / (PRODUCTS_AT_ONCE * 2 * workload.matrix**3)
    utilisation = times.ratio(PRODUCT, way)
    judged = times.ratio(TRANSFORMERS, way) if TRANSFORMERS in times.seconds else utilisation
    seconds = times.median(way)
    return Row(
        way=way,
        sequence=workload.sequence,
        batch=workload.batch,
        layers=workload.config.num_layers,
        median_seconds=seconds,
        tokens_per_second=workload.tokens / seconds,
        model_flops_per_second=workload.flops / seconds,
        utilisation=utilisation.median * scale,
        speed_over_transformers=judged.median if TRANSFORMERS in times.seconds else None,
        spread=judged.spread if TRANSFORMERS in times.seconds else utilisation.spread * scale,
        verdict=judged.verdict().value,
    )


def table(found: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| sequence | batch | | ms | tokens/s | TFLOP/s | of the product's rate | over transformers | spread | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ratio = "" if row.speed_over_transformers is None else f"{row.speed_over_transformers:.3f}"
        lines.append(
            f"| {row.sequence} | {row.batch} | {row.way} | {1e3 * row.median_seconds:.2f} "
            f"| {row.tokens_per_second:,.0f} | {row.model_flops_per_second / 1e12:.2f} | {row.utilisation:.1%} "
            f"| {ratio} | {row.spread:.3f} | {'' if row.verdict == Verdict.SOUND.value else row.verdict} |"
        )
    return "\n".join(lines)


def run(
    workload: Workload,
    sequences: Sequence[int],
    variants: Sequence[Variant],
    rounds: int,
    with_transformers: bool,
    path: Path | None,
) -> list[Row]:
    """Measures every length in turn, prints a table of each, and writes all rows to `path`."""
    found: list[Row] = []
    for sequence in sequences:
        at_length = replace(workload, sequence=sequence)
        label = f"{sequence} tokens"
        # Another length would otherwise be compiled for any length, and be slower.
        torch.compiler.reset()
        timed = ways(at_length, variants, with_transformers)
        times = measure(timed, rounds, warm_up_rounds=2, progress=lambda done, total: _show(label, done, total))  # noqa: B023
        found += rows(at_length, times)
        print(table(rows(at_length, times)), flush=True)
        # The next length's models come into being before this name is theirs.
        timed.clear()
    if path is not None:
        beside = path.with_name(path.name + ".tmp")
        beside.write_text(json.dumps([vars(row) for row in found], indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    return found


def _show(label: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (24 * done // total)
        print(f"\r{label:>12} [{bar:<24}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr)
