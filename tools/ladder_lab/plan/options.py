"""The command line of `tools/plan.py`. It needs no torch."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ladder_lab.bench.sizes import SHAPE, SIZES, find_size
from ladder_lab.cost.all_to_all import ALL_TO_ALLS
from ladder_lab.cost.inference import Attention
from ladder_lab.cost.layout import EXPERT_IMBALANCE
from ladder_lab.cost.links import CONTENTION
from ladder_lab.cost.machines import GPUS, OTHER_BOX, PRESETS, Gpu, Machine
from ladder_lab.effective_speed import PUBLISHED
from ladder_lab.plan.layouts import PLANNED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, resolve_model
from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.blueprint.optimizers import OptimizerName
from megatron_ladder.blueprint.wiring import EXPERT_MODES, SHARED_STREAM_MODES, WIRING_FIELDS
from megatron_ladder.command_line import flag_words, parse_command_line, take_subcommand
from megatron_ladder.errors import Problem, UserError, expected_one_of
from megatron_ladder.flags import Check, flag, rule, section_flags

_GPU_FLAGS = ("gpu_memory_gb", "memory_bandwidth_gbs", "peak_tflops")
"""The figures that describe a GPU without the help of its name."""
_MODELS = f"Names: {', '.join(SIZES)}; numbers: {SHAPE}; of a directory, only config.json is read."
_WIRING_FLAGS = ("residual_mode", *WIRING_FIELDS)
_MODEL_FLAGS = frozenset(flag.field_name for flag in section_flags(ModelFlags)) - {*_WIRING_FLAGS}


def _is_path(model: str) -> bool:
    """Whether --model is a file or a directory; the name of a known model is not."""
    try:
        find_size(model)
    except ValueError:
        return "/" in model or Path(model).exists()
    return False


def _gpu_problems(gpu: str, given: Sequence[str]) -> Iterator[Problem]:
    """Find a GPU without figures."""
    missing = [f"{{{name}}}" for name in _GPU_FLAGS if name not in given]
    if gpu not in GPUS and missing:
        yield Problem(
            {"gpu": gpu},
            f"{{}}: {{expected}}; to describe another GPU, give {' and '.join(missing)} as well, and for its box "
            "{gpus_per_node}, {link}, {network} and {network_adapters}",
            expected=expected_one_of(gpu, GPUS),
        )


def _model_problems(model: str, given: Sequence[str]) -> Iterator[Problem]:
    """Find a model without a shape, and flags of a model next to its name, or without a vocabulary."""
    if not _is_path(model):
        try:
            find_size(model)
        except ValueError as error:
            reason = "{}: {error}; or a Hugging Face directory or its config.json"
            yield Problem({"model": model}, reason, error=error)
    if "mtp_num_layers" in given:
        yield Problem({"mtp_num_layers": None}, "{}: plans do not include a drafting head", "leave it out")
    names = [name for name in given if name in _MODEL_FLAGS]
    if names and "model" in given:
        yield Problem({"model": None}, f"{{}} and {{{names[0]}}} exclude each other", "give one of them")
    elif names and "vocab_size" not in given:
        yield Problem({"vocab_size": None}, f"{{}} is required with {{{names[0]}}}")


def _wiring_problems(refused: Collection[str], fix: str, given: Sequence[str]) -> Iterator[Problem]:
    """Find flags of a wiring, all of which are compared."""
    for name in given:
        if name in refused:
            yield Problem({name: None}, "{}: wirings are compared", fix)


@dataclass(frozen=True)
class MachineOptions:
    """Machine. Boxes of equal GPUs. Figures that are not given are those of the GPU's usual box."""

    gpu: str = flag("h100", details=f"Names: {', '.join(GPUS)}.")
    """GPU, by a name that is known, or by any name with --gpu-memory-gb, --memory-bandwidth-gbs and --peak-tflops."""
    gpus_per_node: int | None = flag(None, minimum=1)
    """GPUs of a box."""
    link: str | None = flag(None, choices=PRESETS)
    """Interconnect inside a box."""
    network: str | None = flag(None, choices=PRESETS)
    """Interconnect between boxes."""
    network_adapters: int | None = flag(None, minimum=1)
    """Adapters of a box, which its GPUs share."""
    gpu_memory_gb: float | None = flag(None, above=0)
    """Memory of one GPU, in 10^9 bytes."""
    memory_bandwidth_gbs: float | None = flag(None, above=0)
    """10^9 bytes per second that a GPU reads from its memory."""
    peak_tflops: float | None = flag(None, above=0)
    """Dense bf16 TFLOP/s of one GPU: 100 % utilisation."""
    link_latency_us: float | None = flag(None, minimum=0)
    """Time of a small all-reduce inside a box."""
    link_bandwidth_gbs: float | None = flag(None, above=0)
    """10^9 bytes per second that a large all-reduce moves in and out of each GPU of a box (bus bandwidth
    of nccl-tests)."""
    network_latency_us: float | None = flag(None, minimum=0)
    """Additional time of a small all-reduce for each doubling of the boxes."""
    network_bandwidth_gbs: float | None = flag(None, above=0)
    """10^9 bytes per second through one adapter, in one direction."""
    contention: float = flag(CONTENTION, minimum=0, maximum=1)
    """Share of an overlap that a large collective gives back; about 0.2 if its multiprocessors are bounded."""

    checks = (Check(_gpu_problems, ("gpu", "given")),)

    def machine(self, gpus: int) -> Machine:
        """Return the machine; raise UserError if its interconnects are not known for so many GPUs."""
        usual = Machine.of(self._gpu())
        link = PRESETS.get(self.link or "", usual.link)
        network = PRESETS.get(self.network or "", usual.network)
        machine = Machine(
            usual.gpu,
            self.gpus_per_node or usual.per_box,
            link.changed(self.link_latency_us, self.link_bandwidth_gbs),
            network.changed(self.network_latency_us, self.network_bandwidth_gbs, per_doubling=True),
            self.network_adapters or usual.adapters,
            self.contention,
        )
        inside = min(gpus, machine.per_box)
        for name, preset, ranks in (
            ("link", machine.link, inside),
            ("network", machine.network, math.ceil(gpus / inside)),
        ):
            try:
                preset.seconds(1, ranks)
            except ValueError as error:
                fix = f"give --{name}-latency-us and --{name}-bandwidth-gbs, or another --gpus-per-node"
                raise UserError(f"--{name} {error}: {fix}") from None
        return machine

    def _gpu(self) -> Gpu:
        """Return the GPU of that name with the figures of the command line."""
        flags = {
            "memory_bytes": (self.gpu_memory_gb, 1e9),
            "memory_bytes_per_second": (self.memory_bandwidth_gbs, 1e9),
            "peak_flops": (self.peak_tflops, 1e12),
        }
        figures: dict[str, Any] = {name: value * unit for name, (value, unit) in flags.items() if value is not None}
        if self.gpu not in GPUS:
            return Gpu(self.gpu, **figures, box=OTHER_BOX, source="command line")
        known = GPUS[self.gpu]
        source = f"command line; otherwise {known.source}" if figures else known.source
        if len(figures) == len(flags):
            source = "command line"
        return replace(known, **figures, source=source)

    def place(self, gpus: int) -> str:
        """Return where so many GPUs are, and the flags of that which are assumed."""
        machine = self.machine(gpus)
        where = ""
        used = dict[str, Any]()
        if gpus > machine.per_box:
            adapters = f"{machine.adapters} adapter{'s' if machine.adapters > 1 else ''} a box"
            inside = f"{machine.link.name} and " if machine.per_box > 1 else ""
            where = f" in boxes of {machine.per_box} over {inside}{machine.network.name} ({adapters})"
            used = {"gpus_per_node": machine.per_box} | ({"link": machine.link.name} if inside else {})
            used |= {"network": machine.network.name, "network_adapters": machine.adapters}
        elif gpus > 1:
            where = f" in one box over {machine.link.name}"
            used = {"gpus_per_node": machine.per_box, "link": machine.link.name}
        assumed = flag_words({name: value for name, value in used.items() if getattr(self, name) is None})
        note = f" (assumed: {' '.join(assumed)})" if assumed else ""
        return f"{gpus} x {self.gpu}{where}{note}"


@dataclass(frozen=True)
class LayoutOptions:
    """Layouts. The model to train, and the cluster."""

    model: str = flag("llama-8b", details=_MODELS)
    """Model: a name (llama-8b, or just 8b), a Hugging Face directory, or numbers as in 8x192x512x6x6x4096.
    Flags such as --num-layers describe another one."""
    gpus: int = flag(8, minimum=1)
    """GPUs of the whole cluster."""
    global_batch_size: int = flag(512, aliases=("--batch",), minimum=1)
    """Samples per step."""
    seq_length: int = flag(4096, minimum=1)
    """Tokens per sample."""
    wirings: tuple[str, ...] = flag((*SHARED_STREAM_MODES, *EXPERT_MODES), choices=PLANNED_WIRINGS)
    """Wirings to compare. desync-2x and desync-4x are planned with tensor parallelism only, and without sequence
    parallelism."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, for the memory of its state; the time of its step is not estimated."""
    all_to_all: str = flag("nccl", choices=ALL_TO_ALLS)
    """All-to-all of tokens and their experts: nccl sends a row for each choice, as the trainer does; deepep describes
    kernels that send a token once to each box."""
    expert_imbalance: float = flag(EXPERT_IMBALANCE, minimum=1)
    """Rows that the fullest expert-parallel rank receives and computes, relative to the mean."""
    standard_loss: float = flag(3.2, above=PUBLISHED.limit)
    """Loss of standard in nats per token, from which to state how much loss a faster wiring can afford."""
    top: int = flag(10, minimum=1)
    """Number of layouts to list."""
    json: Path | None = flag(None, output="file")
    """File for all layouts."""

    checks = (
        Check(_model_problems, ("model", "given")),
        Check(partial(_wiring_problems, _WIRING_FLAGS, "give {wirings}"), ("given",)),
    )


@dataclass(frozen=True)
class InferenceOptions:
    """Inference. The model, and the requests."""

    model: str = flag("llama-70b", details=_MODELS)
    """Model: a name (llama-70b, or just 70b), a Hugging Face directory, or numbers as in 8x192x512x6x6x4096.
    Flags such as --num-layers describe another one."""
    tp: int = flag(8, aliases=("--gpus",), minimum=1)
    """Tensor-parallel GPUs."""
    batch: int = flag(4, minimum=1)
    """Equal requests at a time."""
    prompt: int = flag(1024, minimum=1)
    """Tokens of each prompt."""
    generate: int = flag(512, minimum=2)
    """New tokens of each request."""
    weight_bits: float = flag(16, minimum=1, maximum=16)
    """Bits of a weight of the layers: 16, 8 or 4; 4.5 with scales of groups."""
    draft_tokens: int | None = flag(None, minimum=1, requires="accepted_length")
    """Tokens that a drafting head proposes in each decode step."""
    accepted_length: float | None = flag(None, minimum=1, requires="draft_tokens")
    """Tokens that such a step gives on average, as tools/generate.py --draft mtp reports."""
    attention: Attention = "fused"
    """fused: kernels of today, which read the keys and values of a position once and write no scores; expanded: the
    program of the paper, which reads them for each query head, and in prefill writes its scores to memory."""
    json: Path | None = flag(None, output="file")
    """File for all predictions."""

    checks = (
        Check(_model_problems, ("model", "given")),
        Check(partial(_wiring_problems, {*_WIRING_FLAGS} - {"ladder_layers"}, "leave it out"), ("given",)),
        rule(
            lambda draft_tokens, accepted_length: (
                None not in (draft_tokens, accepted_length) and accepted_length > draft_tokens + 1
            ),
            "{accepted_length} is above {draft_tokens} + 1",
            "use at most {draft_tokens} + 1",
        ),
    )


DESCRIPTIONS = {
    "layouts": "List the layouts that fit a cluster, fastest first, and where each wiring pays: the default.",
    "inference": "Predict tokens per second of each wiring, and say whether a ladder would help a machine.",
}
KINDS = {"layouts": LayoutOptions, "inference": InferenceOptions}


def parse_plan(
    argv: Sequence[str],
) -> tuple[MachineOptions, LayoutOptions | InferenceOptions, ModelFlags]:
    """Read the subcommand (`layouts` by default) and its flags; raise UserError with one message per error."""
    arguments = argv if argv and not argv[0].startswith("-") else ["layouts", *argv]
    command, words = take_subcommand(arguments, DESCRIPTIONS, "plan.py", "Plans layouts. Needs no GPU.")
    description = "\n".join(f"plan.py {name}: {text}" for name, text in DESCRIPTIONS.items())
    sections = [MachineOptions, KINDS[command], ModelFlags]
    machine, options, flags = parse_command_line(sections, words, f"plan.py {command}", description)
    return machine, options, flags


def planned_model(options: LayoutOptions | InferenceOptions, flags: ModelFlags) -> tuple[str, ModelConfig]:
    """Return the name and the shape of the model; raise UserError for a file that describes none."""
    length = options.seq_length if isinstance(options, LayoutOptions) else options.prompt + options.generate
    path = Path(options.model)
    if flags.vocab_size is not None:
        model = resolve_model(replace(flags, ladder_layers=None), flags.vocab_size, length, 1)
        name = f"{flags.num_layers} layers of {flags.hidden_size:,}"
    elif _is_path(options.model):
        from megatron_ladder.checkpoint.hf_config import model_config_from_hf
        from megatron_ladder.typed import json_object

        path = path / "config.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"--model {path}: cannot be read ({error.strerror}): give a Hugging Face directory or its config.json"
            ) from None
        name, model = options.model, model_config_from_hf(json_object(path, content), str(path))
    else:
        name, model = options.model, find_size(options.model)
    return name, replace(model, max_position_embeddings=max(model.max_position_embeddings, length))


QUALITY = (
    "Wirings differ in quality as well: docs/paper.md has the paper's figures, docs/studies.md those of toy models, "
    "and tools/study.py measures yours."
)
