"""Training throughput of one device: forward and backward of a micro-batch, compared with transformers and the floor.

The floor is a lower bound on the time: the model's matrix products alone, at the rate of one large product on the same
device. It is measured in the same rounds as the models, so that a clock that slows down under load affects all of them.
Utilisation is the floor over the measured time: model FLOPs (`blueprint/tensors.py`: 3 x forward, full scores) over the
time, as a share of the measured rate.

Our models are compiled as with --compile-sub-blocks, the setting for training on many ranks; transformers' Llama is
compiled whole. The optimizer is not included.
"""

import functools
import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ladder_lab.bench.paired import PairedTimes, measure
from ladder_lab.bench.variants import Variant
from ladder_lab.bench.workloads import build_models
from ladder_lab.markdown import markdown_table
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import ModelFlops
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.files import write_atomically
from megatron_ladder.model.operations import Operations, compile_operations

TRANSFORMERS = "transformers"
PRODUCT = "product"
PRODUCTS_AT_ONCE = 8
"""Products between two clock readings; launching one takes time as well."""


@dataclass(frozen=True)
class ThroughputWorkload:
    """The computation that every way performs, in samples of `sequence` tokens.

    `matrix` is the side of the square product that measures the rate. Without `backend`, nothing is compiled.
    """

    config: ModelConfig
    sequence: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    backend: str | None
    matrix: int

    @property
    def flops(self) -> int:
        """Model FLOPs of one micro-batch, forward and backward."""
        return self.batch * ModelFlops(self.config, self.sequence).training


Row = dict[str, Any]
"""Forward and backward of a micro-batch by one way to train, at one length.

`utilisation` is relative to the rate of one large product of the same rounds. It and `speed_over_transformers` (None
without transformers) are medians of paired ratios; `spread` is the interquartile range of the last one.
"""


def _ways(
    workload: ThroughputWorkload, variants: Sequence[Variant], with_transformers: bool
) -> dict[str, Callable[[], object]]:
    """Return all functions to time, by name; each waits for the device. Our models share one set of weights."""
    alone, device = CommGroup.alone(), workload.device
    operations = Operations()
    if workload.backend is not None:
        operations = compile_operations(operations, workload.backend)
    models = build_models(
        variants, workload.config, ProcessMesh.single(), alone, alone, workload.dtype, device, operations
    )
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch, workload.sequence + 1)
    ids = torch.randint(0, workload.config.vocab_size, shape, generator=generator).to(device)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def training(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        model.train()

        def run() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            loss().backward()
            finish()

        return run

    made = {name: training(model, functools.partial(model, ids[:, :-1], ids[:, 1:])) for name, model in models.items()}
    if with_transformers:
        llama = _transformers_llama(workload.config, workload.dtype, device)
        compiled: Any = llama if workload.backend is None else torch.compile(llama, backend=workload.backend)
        tokens = ids[:, :-1].contiguous()
        made[TRANSFORMERS] = training(llama, lambda: compiled(input_ids=tokens, labels=tokens).loss)
    side = workload.matrix
    left, right = (torch.randn(side, side, dtype=workload.dtype, device=device) for _ in range(2))
    result = torch.empty_like(left)

    def products() -> None:
        for _ in range(PRODUCTS_AT_ONCE):
            torch.mm(left, right, out=result)
        finish()

    return {**made, PRODUCT: products}


def _transformers_llama(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    transformers = importlib.import_module("transformers")
    same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    theirs = transformers.LlamaConfig(
        **{name: getattr(config, name) for name in (*same, "max_position_embeddings")},
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
    )
    with device:
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
    return model.to(device)


def check_transformers() -> None:
    """Raise UserError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError("transformers is not installed: pip install 'transformers>=5.0,<6', or give --no-transformers")


def _rows(workload: ThroughputWorkload, times: PairedTimes) -> list[Row]:
    # The floor is the time of the product, scaled to the FLOPs of the model.
    scale = workload.flops / (PRODUCTS_AT_ONCE * 2 * workload.matrix**3)
    compared = TRANSFORMERS in times.seconds
    rows = []
    for way in times.seconds:
        if way == PRODUCT:
            continue
        utilisation = times.ratio(PRODUCT, way)
        judged = times.ratio(TRANSFORMERS, way) if compared else utilisation
        seconds = times.median(way)
        rows.append(
            {
                "way": way,
                "sequence": workload.sequence,
                "batch": workload.batch,
                "layers": workload.config.num_layers,
                "median_seconds": seconds,
                "tokens_per_second": workload.sequence * workload.batch / seconds,
                "model_flops_per_second": workload.flops / seconds,
                "utilisation": utilisation.median * scale,
                "speed_over_transformers": judged.median if compared else None,
                "spread": judged.spread * (1 if compared else scale),
                "verdict": judged.verdict().value,
            }
        )
    return rows


def _table(found: Sequence[Row]) -> str:
    rows = [
        {
            "": row["way"],
            "sequence": str(row["sequence"]),
            "batch": str(row["batch"]),
            "ms": f"{1e3 * row['median_seconds']:.2f}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "TFLOP/s": f"{row['model_flops_per_second'] / 1e12:.2f}",
            "of the product's rate": f"{row['utilisation']:.1%}",
            "over transformers": f"{row['speed_over_transformers'] or math.nan:.3f}",
            "spread": f"{row['spread']:.3f}",
            "verdict": row["verdict"],
        }
        for row in found
    ]
    return markdown_table(rows)


def run(
    workload: ThroughputWorkload,
    sequences: Sequence[int],
    variants: Sequence[Variant],
    rounds: int,
    with_transformers: bool,
    path: Path | None,
) -> list[Row]:
    """Measure every length, print a table of each, and write all rows to `path`."""
    found: list[Row] = []
    for sequence in sequences:
        at_length = replace(workload, sequence=sequence)
        # Otherwise the second length is compiled for dynamic lengths, which is slower.
        torch.compiler.reset()
        timed = _ways(at_length, variants, with_transformers)
        times = measure(timed, rounds, warm_up_rounds=2, label=f"{sequence} tokens")
        new = _rows(at_length, times)
        found += new
        print(_table(new), flush=True)
        # Frees the models before those of the next length are built.
        timed.clear()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    return found
