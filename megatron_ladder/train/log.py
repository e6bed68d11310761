"""What a run reports: a banner, one line per interval, curves, and events in the record."""

import hashlib
import json
import math
import os
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from megatron_ladder import __version__
from megatron_ladder.blueprint import tensors
from megatron_ladder.blueprint.flops import ModelFlops, peak_flops
from megatron_ladder.blueprint.model import ModelConfig, mixers_text
from megatron_ladder.blueprint.specs import padded_vocab_size
from megatron_ladder.blueprint.wiring import layers_text
from megatron_ladder.comm.agreement import Peers
from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.loader import Sources
from megatron_ladder.data.packing import PackedSource
from megatron_ladder.engine.build import partition
from megatron_ladder.engine.schedule import make_schedule
from megatron_ladder.errors import BadNumbersError, LostPeerError, Problem, counted, exit_code_of, without_passwords
from megatron_ladder.progress import print_rank_0
from megatron_ladder.train.curves import Curves
from megatron_ladder.train.record import EVALUATES, RunRecord
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import Evaluation, StepResult


def banner(trainer: Trainer, sources: Sources) -> str:
    """Return the derived numbers of a run and of its data, one per line."""
    run, model, training, parallel = trainer.run, trainer.run.model, trainer.run.training, trainer.run.parallel
    flops = ModelFlops(model, training.seq_length, training.mtp_depths)
    vocab_size = padded_vocab_size(model.vocab_size, parallel.tensor_model_parallel_size)
    used = f", of which a token uses {tensors.active_parameters(model):,}" if model.moe_layers else ""
    distillation = trainer.model.distillation
    mixers = mixers_text(model)
    rows = {
        "processes": f"{trainer.mesh.describe()}, on {trainer.device.type}, ZeRO {parallel.zero_stage}",
        **({"threads": f"{torch.get_num_threads()} (OMP_NUM_THREADS)"} if trainer.device.type == "cpu" else {}),
        **({"stages": _stages(run)} if parallel.pipeline_model_parallel_size > 1 else {}),
        "model": " ".join(model.to_words()),
        "wiring": _wiring(model),
        **({"mixers": mixers} if ";" in mixers else {}),
        "precision": "bf16, fp32 masters and gradient accumulation" if training.bf16 else "fp32",
        **({} if distillation is None else {"teacher": " ".join(distillation.teacher.config.to_words())}),
        "parameters": f"{tensors.parameter_count(model).total:,}{used}; the vocabulary is padded to {vocab_size:,}",
        "batch": f"{counted(run.global_batch_size, 'sample')} = "
        f"{counted(run.accumulation_steps, 'accumulation step')} x "
        f"{counted(run.data_parallel_size, 'data-parallel rank')} x {training.micro_batch_size}",
        "tokens": f"{run.tokens_per_step:,} a step, {run.tokens_per_step * training.train_iters:,} in "
        f"{counted(training.train_iters, 'step')}",
        "FLOPs": f"{flops.training * run.global_batch_size:.3e} a step",
        "overlap": _overlap(trainer),
        "norm": trainer.norm_description,
        **({"linear attention": "flash-linear-attention"} if training.linear_attention_implementation == "fla" else {}),
        "optimizer": trainer.optimizer_description,
    }
    width = max(map(len, rows))
    return "\n".join(
        [
            f"megatron_ladder {__version__}",
            *(f"  {name:<{width}}  {rows[name]}" for name in rows),
            *_data_notes(run, sources),
        ]
    )


def _data_notes(run: RunConfig, sources: Sources) -> Iterator[str]:
    """Yield one line per data set: its tokens, how often the run reads them, and how conversations are packed."""
    for part, source in sources.labeled.items():
        for data, weight in zip(source.sources, source.weights, strict=True):
            note = f"{part}: {data.name}: {data.tokens:,} tokens in {counted(len(data.documents), 'document')}"
            if part == "train":
                samples = run.training.train_iters * run.global_batch_size * weight / sum(source.weights)
                note += f", {samples * run.training.seq_length / data.tokens:.3g} epochs"
            if isinstance(data, PackedSource):
                note += f"; {counted(data.conversations, 'conversation')} in {counted(len(data), 'row')}"
                note += f", {data.filled:.1%} full; "
                note += f"{data.cut:,} are longer than a row and cut; in {data.without_targets:,} no token counts"
            yield note


def _wiring(model: ModelConfig) -> str:
    if not model.wiring.late:
        return model.residual_mode
    return f"{model.residual_mode} in {layers_text(model.ladder_layers, model.num_layers)}"


def _planned_idle(run: RunConfig) -> float:
    """Return the share of its slots in which a pipeline stage runs no pass; `StepResult.pipeline_idle` is measured."""
    slots = make_schedule(run.parallel.pipeline_model_parallel_size, run.chunks, run.accumulation_steps)[0]
    return sum(slot.work is None for slot in slots) / len(slots)


def _stages(run: RunConfig) -> str:
    ranges = partition(run)
    layers = ", ".join(str(layers.start) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}" for layers in ranges)
    steps = counted(run.accumulation_steps, "accumulation step")
    return f"layers {layers}; the pipeline idles {_planned_idle(run):.0%} of a step with {steps}"


def _overlap(trainer: Trainer) -> str:
    mesh, plan = trainer.mesh, trainer.model.stack.plan
    # Among data-parallel ranks, only routed experts exchange their outputs.
    exchanged = range(len(plan.arrivals)) if mesh.tensor.size > 1 else plan.complete
    if mesh.tensor.size == mesh.experts.size == 1:
        return "nothing to hide: one tensor-parallel process"
    if not trainer.run.parallel.tp_overlap:
        return "off: every sum over the ranks is waited for at once"
    late = sum(plan.arrivals[output] > output + 1 for output in exchanged)
    what = "sums" if mesh.experts.size == 1 else "outputs"
    return f"the {what} of {late} of {len(exchanged)} sub-blocks run under later ones, forward and backward"


class RunLog:
    """Console, curves and record of rank 0. The other ranks call it too, without effect."""

    def __init__(self, trainer: Trainer, first_iteration: int, record: RunRecord, trains: bool = True) -> None:
        """`first_iteration` is the first step of this process; `trains` is False if it takes no step."""
        run = trainer.run
        self._record = record
        self._run = run
        self._rank = trainer.mesh.world.rank
        self._device = trainer.device
        flops = ModelFlops(run.model, run.training.seq_length, run.training.mtp_depths)
        self._flops_per_step = flops.training * run.global_batch_size
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        peak = peak_flops(name) if run.training.bf16 else None
        self._peak_flops = None if peak is None else peak * trainer.mesh.world.size
        self._curves = Curves(run, first_iteration - 1, trains, self._rank)
        self._interval_start = time.perf_counter()
        self._last = first_iteration - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        self._curves.close(self._last, failed=error_type is not None)

    def training(self, iteration: int, loss: float, last: StepResult) -> None:
        """Report the steps since the last call; `loss` is their mean, `last` the last one's result."""
        now = time.perf_counter()
        steps, seconds = iteration - self._last, now - self._interval_start
        self._interval_start, self._last = now, iteration
        if self._rank != 0:
            return
        total = self._run.training.train_iters
        step_seconds = seconds / steps
        tokens_per_second = self._run.tokens_per_step / step_seconds
        flops = self._flops_per_step / step_seconds
        eta = timedelta(seconds=round((total - iteration) * step_seconds))
        others = {**last.extra_losses, **_describe_loads(last.loads)}
        shown = "".join(f"| {name} {value:.4g} " for name, value in others.items())
        shares = {} if self._peak_flops is None else {"MFU": flops / self._peak_flops}
        if last.pipeline_idle is not None:
            shares["pipeline idle"] = last.pipeline_idle
        shown_shares = "".join(f"| {name} {value:.1%} " for name, value in shares.items())
        print_rank_0(
            f"iteration {iteration:>{len(str(total))}}/{total} | lm loss {loss:.4f} {shown}"
            f"| learning rate {last.learning_rate:.3e} | grad norm {last.gradient_norm:.3f} "
            f"| {tokens_per_second:,.0f} tokens/s | {_engineering(flops)}FLOP/s | {step_seconds:.3f} s/step "
            f"{shown_shares}| ETA {eta}",
            self._rank,
        )
        self._record.write(
            "progress",
            iteration=iteration,
            steps=steps,
            seconds=round(seconds, 6),
            loss=loss,
            tokens_per_second=round(tokens_per_second, 1),
            **_as_fields(others | shares),
        )
        if self._device.type == "cuda":
            peak_memory = torch.cuda.max_memory_allocated(self._device)
        else:
            peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        values = {
            "train/lm loss": loss,
            **{f"train/{name}": value for name, value in others.items()},
            "train/learning rate": last.learning_rate,
            "train/grad norm": last.gradient_norm,
            "speed/tokens per second": tokens_per_second,
            "speed/model TFLOP per second": flops / 1e12,
            "speed/seconds per step": step_seconds,
            **{f"speed/{name}": value for name, value in shares.items()},
            "memory/peak GB": peak_memory / 1e9,
        }
        self._curves.metrics(iteration, values)

    def validation(self, iteration: int, result: Evaluation, name: str = "") -> None:
        """Report the losses of a validation set, which may have a name."""
        label = f"{name} " if name else ""
        loss, mtp_losses = result
        # Unlike `math.exp`, this is infinite for large losses.
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
        cause = Problem({}, "no token counts (raise {eval_iters}), or a weight is not finite")
        why = f" | {cause}" if any(map(math.isnan, (loss, *mtp_losses.values()))) else ""
        others = "".join(f" | {of_mtp} {value:.4f}" for of_mtp, value in mtp_losses.items())
        line = f"iteration {iteration} | valid {label}lm loss {loss:.4f} | ppl {perplexity:.4g}{others}{why}"
        print_rank_0(line, self._rank)
        named = {"name": name} if name else {}
        recorded = _as_fields(mtp_losses) | named
        self._record.write_first("evaluation", iteration=iteration, loss=loss, ppl=perplexity, **recorded)
        curves = {"lm loss": loss, "ppl": perplexity, **mtp_losses}
        self._curves.metrics(iteration, {f"valid/{label}{curve}": value for curve, value in curves.items()})

    def samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        """Report prompts and their generated continuations."""
        for prompt, text in samples:
            print_rank_0(f"iteration {iteration} | sample {prompt!r} -> {text!r}", self._rank)
            self._record.write_first("sample", iteration=iteration, prompt=prompt, text=text)
        self._curves.samples(iteration, samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the block from tokens/s."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._interval_start += time.perf_counter() - start


def _as_fields(values: Mapping[str, float]) -> dict[str, float]:
    """Name values as in the record."""
    return {name.replace(" ", "_"): value for name, value in values.items()}


def _describe_loads(loads: Tensor) -> dict[str, float]:
    """Return how evenly a step has used the experts: loads [layers, E] -> numbers by name, none of a dense model.

    The largest load is that of the busiest expert of all layers, as a multiple of the mean; the entropy is 1 if all
    loads are equal, and 0 if one expert has all tokens, in the mean of the layers.
    """
    if not len(loads):
        return {}
    experts = loads.shape[-1]
    shares = loads / loads.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1) / math.log(max(experts, 2))
    return {
        "largest expert load": float(shares.max()) * experts,
        "expert load entropy": float(entropy.mean()),
        "dead experts": int((loads == 0).sum()),
    }


def _engineering(value: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {prefix}"
    return f"{value:.0f} "


def describe_start(trainer: Trainer, iteration: int) -> dict[str, Any]:
    """Return the fields of the record's event `start`; `iteration` is the number of steps done before."""
    run = trainer.run
    configuration = json.dumps(run.to_dict(), sort_keys=True)
    return {
        "iteration": iteration,
        "reason": EVALUATES if run.logging.skip_train else "goes on" if iteration else "begins",
        "train_iters": run.training.train_iters,
        "layout": f"{trainer.mesh.describe()}, ZeRO {run.parallel.zero_stage}",
        **({"planned_pipeline_idle": _planned_idle(run)} if trainer.mesh.pipeline.size > 1 else {}),
        "configuration": hashlib.sha256(configuration.encode()).hexdigest()[:16],
        "versions": {"megatron_ladder": __version__, "torch": torch.__version__},
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def report_finding(record: RunRecord, rank: int, iteration: int, result: StepResult) -> None:
    """Print and record what was wrong with a step, if anything."""
    if result.expert_capacity is not None:
        cause = "an expert needed more rows than {moe_expert_capacity} allowed, and no token was dropped"
        note = Problem({}, f"iteration {iteration} was repeated with {result.expert_capacity}: {cause}")
        print_rank_0(str(note), rank)
        record.write_first("capacity", iteration=iteration, rows=result.expert_capacity)
    finding = result.finding
    if finding is None:
        return
    print_rank_0(finding.text + (": the step was left out" if finding.skipped else ""), rank)
    record.write_first(
        "skip" if finding.skipped else "spike",
        iteration=iteration,
        reason=finding.kind,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        **finding.details,
    )


@contextmanager
def recording_failures(record: RunRecord, peers: Peers) -> Iterator[None]:
    """Record the reason of a run that ends with an error."""
    try:
        yield
    except LostPeerError as error:
        record_lost_peers(record, peers, error)
        raise
    except Exception as error:
        # All ranks raise BadNumbersError; any other error may occur on one rank only.
        if record.rank == 0 or not isinstance(error, BadNumbersError):
            reason = without_passwords(f"{type(error).__name__}: {error}")
            record.write("stop", rank=record.rank, reason=reason, code=int(exit_code_of(error)))
        raise


def record_lost_peers(record: RunRecord, peers: Peers, error: LostPeerError) -> None:
    """Record lost ranks, on the lowest rank that is not lost, because all remaining ranks notice the loss."""
    if record.rank == min({*range(len(peers.hosts))} - {*error.lost}, default=record.rank):
        reason = str(error).splitlines()[0]
        kind = "hang" if error.timed_out else "lost"
        record.write(kind, ranks=list(error.lost), where=peers.describe(error.lost), reason=reason)
