"""Training throughput of one device: forward and backward of a micro-batch, compared with transformers and the floor.

The floor is a lower bound on the time: the model's matrix products alone, at the rate of one large product on the same
device. It is measured in the same rounds as the models, so that a clock that slows down under load affects all of them.
Utilisation is the floor over the measured time: model FLOPs (`blueprint/tensors.py`: 3 x forward, full scores) over the
time, as a share of the measured rate.

Our models are compiled as with --compile-sub-blocks and captured as with --cuda-graph, the defaults of training on
GPUs; transformers' model of the same type is compiled whole, and left out for models with experts and if transformers
is not installed. The optimizer is not included. A GPU computes in bf16, and a CPU in fp32. Times on a CPU are those of
the process on all its cores, which other processes disturb less.
"""

import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ladder_lab.bench.options import ThroughputOptions
from ladder_lab.bench.paired import PairedTimes, RatioVerdict, measure
from ladder_lab.bench.sizes import find_size
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.bench.workloads import build_models, training_pass
from ladder_lab.output import markdown_table, write_json
from megatron_ladder.blueprint.flops import ModelFlops, peak_flops
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import read_rank_info
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.model.operations import Operations, compile_operations, require_compiler

TRANSFORMERS = "transformers"
PRODUCT = "product"
PRODUCTS_AT_ONCE = 8
"""Products between two clock readings; launching one takes time as well."""


Row = dict[str, Any]
"""Forward and backward of a micro-batch by one way to train, at one length.

`utilisation` is relative to the rate of one large product of the same rounds. It and `speed_over_transformers` (None
without transformers) are medians of paired ratios; `spread` is the interquartile range of the last one. `mfu` is
relative to the rate in the data sheet of the device, if known.
"""


def _ways(
    options: ThroughputOptions, config: ModelConfig, sequence: int, device: torch.device, graphs: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return all functions to time, by name; each waits for the device. Our models share one set of weights.

    The end of `graphs` frees what was captured.
    """
    # Our models, and a batch.
    alone = CommGroup.alone()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    compiles = options.backend != "none"
    operations = compile_operations(Operations(), options.backend) if compiles else Operations()
    variants = [VARIANTS[wiring] for wiring in options.wirings]
    models = build_models(variants, config, ProcessMesh.single(), alone, alone, dtype, device, operations)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (options.batch, sequence + 1), generator=generator).to(device)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def training(model: nn.Module, loss: Callable[[], Tensor], cuda_graph: bool) -> Callable[[], None]:
        run = graphs.enter_context(training_pass(model, loss, cuda_graph))

        def finished() -> None:
            run()
            finish()

        return finished

    captures = options.cuda_graph and device.type == "cuda"
    passes = {
        name: training(model, functools.partial(model, ids[:, :-1], ids[:, 1:]), captures)
        for name, model in models.items()
    }
    # Transformers' model.
    if config.num_experts == 0 and importlib.util.find_spec(TRANSFORMERS) is not None:
        theirs = _transformers_model(config, dtype, device)
        compiled: Any = torch.compile(theirs, backend=options.backend) if compiles else theirs
        tokens = ids[:, :-1].contiguous()
        passes[TRANSFORMERS] = training(
            theirs, lambda: compiled(input_ids=tokens, labels=tokens).loss, cuda_graph=False
        )
    # The floor.
    left = torch.randn(options.matrix, options.matrix, dtype=dtype, device=device)
    right = torch.randn_like(left)
    result = torch.empty_like(left)

    def products() -> None:
        for _ in range(PRODUCTS_AT_ONCE):
            torch.mm(left, right, out=result)
        finish()

    return {**passes, PRODUCT: products}


def _transformers_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    transformers = importlib.import_module(TRANSFORMERS)
    kind = hf_type(config)
    values = hf_config(config, dtype=str(dtype).removeprefix("torch."), model_type=kind) | {"use_cache": False}
    theirs = transformers.AutoConfig.for_model(**values)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
    return model.to(device)


def _rows(
    options: ThroughputOptions, config: ModelConfig, sequence: int, times: PairedTimes, peak: float | None
) -> list[Row]:
    flops = options.batch * ModelFlops(config, sequence).training
    # The floor is the time of the product, scaled to the FLOPs of the model.
    scale = flops / (PRODUCTS_AT_ONCE * 2 * options.matrix**3)
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
                "sequence": sequence,
                "batch": options.batch,
                "layers": config.num_layers,
                "median_seconds": seconds,
                "tokens_per_second": sequence * options.batch / seconds,
                "model_flops_per_second": flops / seconds,
                "utilisation": utilisation.median * scale,
                "mfu": None if peak is None else flops / seconds / peak,
                "speed_over_transformers": judged.median if compared else None,
                "spread": judged.spread * (1 if compared else scale),
                "verdict": judged.verdict().value,
            }
        )
    return rows


def _table(rows: Sequence[Row]) -> str:
    cells = [
        {
            "": row["way"],
            "sequence": str(row["sequence"]),
            "batch": str(row["batch"]),
            "ms": f"{1e3 * row['median_seconds']:.2f}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "TFLOP/s": f"{row['model_flops_per_second'] / 1e12:.2f}",
            "of the product's rate": f"{row['utilisation']:.1%}",
            "MFU": "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "over transformers": f"{row['speed_over_transformers'] or math.nan:.3f}",
            "spread": f"{row['spread']:.3f}",
            "verdict": row["verdict"],
        }
        for row in rows
    ]
    return markdown_table(cells)


def run(options: ThroughputOptions) -> None:
    """Measure every length, print a table of each, and write all rows; raise BadNumbersError for noisy ratios."""
    device = read_rank_info().device()
    if options.backend == "inductor":
        require_compiler("--backend inductor", device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.size}, torch.compile {options.backend}, on {name}, torch {torch.__version__}\n", flush=True)
    rows = list[Row]()
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    shape = find_size(options.size)
    config = replace(shape, max_position_embeddings=max(shape.max_position_embeddings, *options.sequence))
    for sequence in options.sequence:
        # Otherwise the second length is compiled for dynamic lengths, which is slower.
        torch.compiler.reset()
        with ExitStack() as graphs:
            timed = _ways(options, config, sequence, device, graphs)
            times = measure(timed, options.rounds, warm_up_rounds=2, label=f"{sequence} tokens", clock=clock)
        of_length = _rows(options, config, sequence, times, peak_flops(name))
        rows += of_length
        print(_table(of_length), flush=True)
        # Frees the models before those of the next length are built.
        timed.clear()
    write_json(options.json, rows)
    doubtful = [row for row in rows if row["verdict"] != RatioVerdict.SOUND.value]
    if doubtful:
        raise BadNumbersError("; ".join(f"{row['way']} at {row['sequence']}: {row['verdict']}" for row in doubtful))
