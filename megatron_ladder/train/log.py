"""What a user sees of a run: derived numbers before it, one line an interval, TensorBoard."""

import contextlib
import json
import resource
import time
from types import TracebackType
from typing import Self

import torch

from megatron_ladder import __version__
from megatron_ladder.blueprint.tensors import ModelFlops, padded_vocab_size, parameter_count
from megatron_ladder.config.run import RunConfig
from megatron_ladder.engine.build import partition
from megatron_ladder.train.curves import Curves
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.setup import Trainer


def say(text: str, rank: int) -> None:
    """Prints on the first rank, at once; a terminal that is gone, or a full disk, loses the text and not the run."""
    if rank == 0:
        with contextlib.suppress(OSError):
            print(text, flush=True)


def banner(trainer: Trainer) -> str:
    """The derived numbers of a run."""
    run, model = trainer.run, trainer.run.model
    flops = ModelFlops(model, run.training.seq_length)
    tensor_parallel = run.parallel.tensor_model_parallel_size
    layers = model.ladder_layers
    wiring: str = model.residual_mode
    if model.wiring.late:
        which = "all layers" if len(layers) == model.num_layers else f"layers {list(layers)} of {model.num_layers}"
        wiring += f": {which} read the stream {model.residual_staleness} sub-block(s) late"
    if model.wiring.stream == "per rank":
        wiring += f": {model.desync_tp} streams, summed after every {model.desync_interval} sub-blocks"
    rows = {
        "processes": f"{trainer.mesh.describe()}, on {trainer.device.type}, ZeRO {run.parallel.zero_stage}"
        + (", optimizer on the host" if run.parallel.offload_optimizer == "cpu" else ""),
        **({"stages": _stages(run)} if run.parallel.pipeline_model_parallel_size > 1 else {}),
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, ffn {model.ffn_hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_key_value_heads} key-value) of {model.head_dim}",
        "wiring": wiring,
        "parameters": f"{parameter_count(model).total:,}",
        "vocabulary": f"{model.vocab_size:,} words, padded to {padded_vocab_size(model.vocab_size, tensor_parallel):,}",
        "precision": _precision(run),
        "batch": f"{run.global_batch_size} samples = {run.accumulation_steps} accumulation steps x "
        f"{run.data_parallel_size} data-parallel ranks x {run.training.micro_batch_size}",
        "tokens": f"{run.tokens_per_step:,} a step, {run.tokens_per_step * run.training.train_iters:,} in "
        f"{run.training.train_iters:,} steps",
        "FLOPs": f"{flops.training * run.global_batch_size:.3e} a step; with recomputation "
        f"{flops.training_on_hardware(run.recompute_layers) * run.global_batch_size:.3e} on the hardware",
        "overlap": _overlap(run),
        "recompute": f"{run.recompute_layers} layers" if run.recompute_layers else "none",
        "norm": trainer.implementations["norm"],
        "optimizer": f"AdamW by {trainer.implementations['optimizer']}",
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join([f"megatron_ladder {__version__}", *lines])


def _precision(run: RunConfig) -> str:
    training = run.training
    if not (training.bf16 or training.fp16):
        return "fp32"
    masters = "fp32 masters and gradient accumulation"
    if training.bf16:
        return f"bf16, {masters}"
    scale = "dynamic" if training.loss_scale is None else f"{training.loss_scale:g}"
    return f"fp16, {masters}, loss scale {scale}"


def _stages(run: RunConfig) -> str:
    """With p stages and m micro-batches, 1F1B idles for p - 1 of m + p - 1 of its steps (arXiv 2104.04473)."""
    ranges = partition(run)
    idle = (len(ranges) - 1) / (run.accumulation_steps + len(ranges) - 1)
    layers = ", ".join(str(layers.start) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}" for layers in ranges)
    return f"layers {layers}; the pipeline idles {idle:.0%} of a step with {run.accumulation_steps} accumulation steps"


def _overlap(run: RunConfig) -> str:
    if run.parallel.tensor_model_parallel_size == 1:
        return "nothing to hide: one tensor-parallel process"
    if run.model.wiring.stream == "per rank":
        return "none: the sum of desynchronised streams is waited for at once"
    if not run.parallel.tp_overlap:
        return "off: every all-reduce is waited for at once"
    if run.model.ladder_layers:
        reduces = "reduce-scatters and all-gathers" if run.parallel.sequence_parallel else "all-reduces"
        late, all_kinds = run.model.wiring.late, run.model.wiring.sub_blocks
        under = "sub-block" if late == all_kinds else " and ".join(kind.value for kind in late)
        return f"ladder layers' {reduces} run under the next {under}, forward and backward"
    reduces = "reduce-scatters" if run.parallel.sequence_parallel else "all-reduces"
    return f"{reduces} of input gradients run under the gradients of weights"


class RunLog:
    """Console, TensorBoard and record of rank 0; the other ranks call it too, and it does nothing there."""

    def __init__(self, trainer: Trainer, first_iteration: int, record: RunRecord, trains: bool = True) -> None:
        """`first_iteration`: the first step that this process will take; it takes none unless it `trains`."""
        run = trainer.run
        self._record = record
        self._run = run
        self._rank = trainer.mesh.world.rank
        self._device = trainer.device
        self._flops_per_step = ModelFlops(run.model, run.training.seq_length).training * run.global_batch_size
        told = f"```json\n{json.dumps(run.to_dict(), indent=2)}\n```"
        folder = run.logging.tensorboard_dir if self._rank == 0 else None
        self._curves = Curves(folder, first_iteration - 1, told, goes_on=trains)
        self._since = time.perf_counter()
        self._last = first_iteration - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._curves.close(self._last)

    def training(self, iteration: int, loss: float, learning_rate: float, gradient_norm: float) -> None:
        """One line for the steps since the last one; `loss` is their mean."""
        now = time.perf_counter()
        steps, seconds = iteration - self._last, now - self._since
        self._since, self._last = now, iteration
        if self._rank != 0:
            return
        run = self._run
        step_seconds = seconds / steps
        tokens_per_second = run.tokens_per_step / step_seconds
        flops = self._flops_per_step / step_seconds
        left = (run.training.train_iters - iteration) * step_seconds
        total = run.training.train_iters
        say(
            f"iteration {iteration:>{len(str(total))}}/{total} | lm loss {loss:.4f} "
            f"| learning rate {learning_rate:.3e} | grad norm {gradient_norm:.3f} | {tokens_per_second:,.0f} tokens/s "
            f"| {_engineering(flops)}FLOP/s | {step_seconds:.3f} s/step | ETA {duration(left)}",
            self._rank,
        )
        self._record.write(
            "progress", iteration=iteration, steps=steps, seconds=round(seconds, 6), loss=loss,
            tokens_per_second=round(tokens_per_second, 1),
        )  # fmt: skip
        self._curves.scalars(
            iteration,
            {
                "train/lm loss": loss,
                "train/learning rate": learning_rate,
                "train/grad norm": gradient_norm,
                "speed/tokens per second": tokens_per_second,
                "speed/model TFLOP per second": flops / 1e12,
                "speed/seconds per step": step_seconds,
                "memory/peak GB": peak_memory(self._device) / 1e9,
            },
        )

    def activations(self, kept_bytes: int) -> None:
        """What the first forward pass left occupied for its backward, on the fullest rank."""
        say(f"activations kept by one micro-batch: {kept_bytes / 1e6:,.1f} MB on the fullest process", self._rank)

    def validation(self, iteration: int, loss: float) -> None:
        """One line for an evaluation."""
        say(f"iteration {iteration} | valid lm loss {loss:.4f}", self._rank)
        self._record.write_first("evaluation", iteration=iteration, loss=loss)
        self._curves.scalars(iteration, {"valid/lm loss": loss})

    def without_time(self) -> "PausedClock":
        """`with log.without_time():` around what is no training, so that it does not count in tokens/s."""
        return PausedClock(self)

    def shift(self, seconds: float) -> None:
        """Moves the beginning of the current interval."""
        self._since += seconds


class PausedClock:
    """Takes the time spent inside out of the log's current interval."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.shift(time.perf_counter() - self._began)


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held: on its GPU, or resident on a machine without."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _engineering(value: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {prefix}"
    return f"{value:.0f} "
