"""One rank of `plan.py calibrate`: times all-reduces, decoding, and matrix products under an all-reduce."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder_lab.bench.sizes import SIZES
from ladder_lab.bench.workloads import Workload
from ladder_lab.plan.calibration import (
    ClusterCalibration,
    DecodeTime,
    ProductTime,
    ReduceTime,
    write_calibration,
)
from ladder_lab.plan.options import CalibrateOptions
from megatron_ladder.blueprint.model import key_value_replicas, tensor_parallel_errors
from megatron_ladder.comm.launch import naming_lost_peers, read_rank_info, start_process_group, stop_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.training import ParallelConfig
from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.model.language_model import LanguageModel

TIMEOUT_MINUTES = 10.0
REDUCES_AT_ONCE = 10
"""All-reduces in one timing, so that the overhead of the timing is small."""
WEIGHT = 0.01
"""Value of every parameter: the decoded tokens do not matter, and drawing weights would take time."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the measured tensors, models and square matrices, and the tokens decoded in one timing."""

    reduce_bytes: tuple[int, int, int, int]
    models: tuple[str, str]
    product: int
    dtype: torch.dtype
    tokens: int = 8


LARGE = _Sizes((1 << 14, 1 << 19, 1 << 23, 1 << 26), ("llama-1b", "llama-8b"), 8192, torch.bfloat16)
SMALL = _Sizes((1 << 12, 1 << 16, 1 << 19, 1 << 22), ("small-train", "small"), 512, torch.float32)


def run_rank(options: CalibrateOptions) -> None:
    """Measure as one of the ranks; rank 0 writes the file. Raises UserError if the ranks or the file are unsuitable."""
    place = read_rank_info()
    if torch.cuda.is_available() and place.world_size > torch.cuda.device_count():
        raise UserError(f"--tp {place.world_size}: this machine has {torch.cuda.device_count()} GPUs")
    small = options.small or not torch.cuda.is_available()
    sizes = SMALL if small else LARGE
    errors = [m for name in sizes.models for m in tensor_parallel_errors(SIZES[name], place.world_size)]
    raise_user_errors(f"--tp {place.world_size}: {error}" for error in errors)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with naming_lost_peers():
        device = start_process_group(place, TIMEOUT_MINUTES)
        calibration = _Measurement(sizes, device, options.rounds).run()
        if place.rank == 0:
            write_calibration(calibration, options.output)
            print(_summary(calibration) + f"\nwritten to {options.output}", flush=True)
        stop_process_group()


class _Measurement:
    """The measurements, in which all ranks of the default process group take part."""

    def __init__(self, sizes: _Sizes, device: torch.device, rounds: int) -> None:
        self.sizes, self.device, self.rounds = sizes, device, rounds
        # Bounded like the group that training overlaps with computation.
        ranks, ctas = torch.distributed.get_world_size(), ParallelConfig().tp_comm_max_ctas
        self.group = ProcessMesh.build(ranks, tp_comm_max_ctas=ctas).tensor

    def run(self) -> ClusterCalibration:
        reduces = tuple(self.reduce(size) for size in self.sizes.reduce_bytes)
        decodes = tuple(self.decode(name) for name in self.sizes.models)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return ClusterCalibration(name, self.group.size, reduces, decodes, self.product(reduces[-1]))

    def reduce(self, num_bytes: int) -> ReduceTime:
        tensor = self._tensor(num_bytes)

        def reduces() -> None:
            for _ in range(REDUCES_AT_ONCE):
                self._reduce(tensor)

        return ReduceTime(num_bytes, self._median(reduces) / REDUCES_AT_ONCE)

    def decode(self, name: str) -> DecodeTime:
        config, ranks = SIZES[name], self.group.size
        mesh = ProcessMesh.build(ranks, kv_replicas=key_value_replicas(config, ranks))
        model = LanguageModel(config, mesh, dtype=self.sizes.dtype, device=self.device).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(WEIGHT)
        workload = Workload("decode", batch=1, sequence=16, tokens=self.sizes.tokens)
        with workload.prepare(model, mesh, self.rounds + 1) as run:
            seconds = self._median(run) / self.sizes.tokens
        looked_up = 0 if config.tie_embeddings else model.embedding.weight.numel()
        read = sum(parameter.numel() for parameter in model.parameters()) - looked_up
        size = self.sizes.dtype.itemsize
        return DecodeTime(name, size * read, config.num_layers, size * config.hidden_size, seconds)

    def product(self, reduce: ReduceTime) -> ProductTime:
        """Time as many products as take about as long as this reduce, alone and together with it."""
        n = self.sizes.product
        a, b = (torch.ones(n, n, dtype=self.sizes.dtype, device=self.device) for _ in range(2))
        out = torch.empty_like(a)
        once = self._median(lambda: torch.mm(a, b, out=out))
        times = max(1, round(reduce.seconds / once))
        tensor = self._tensor(reduce.num_bytes)

        def products() -> None:
            for _ in range(times):
                torch.mm(a, b, out=out)

        alone, reducing = self._median(products), self._median(lambda: self._reduce(tensor))
        together = self._median(lambda: self._reduce(tensor, products))
        return ProductTime(2.0 * n**3 * times, alone, reduce.num_bytes, reducing, together)

    def _tensor(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes // self.sizes.dtype.itemsize, dtype=self.sizes.dtype, device=self.device)

    def _reduce(self, tensor: Tensor, meanwhile: Callable[[], object] = lambda: None) -> None:
        work = self.group.start_all_reduce(tensor)
        meanwhile()
        if work is not None:
            work.wait()

    def _median(self, run: Callable[[], object]) -> float:
        """Return the slowest rank's median seconds, after one warm-up round; equal on all ranks."""

        def finish() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        seconds = []
        for number in range(self.rounds + 1):
            self.group.barrier()
            finish()
            began = time.perf_counter()
            run()
            finish()
            if number:
                seconds.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=self.device)
        return float(self.group.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX))


def _summary(calibration: ClusterCalibration) -> str:
    latency, per_byte = calibration.link
    rate = "without limit" if per_byte == 0 else f"{1e-9 / per_byte:.2f} GB/s"
    try:
        memory_rate, floor = calibration.decoding
        decoding = f"weights are read at {memory_rate / 1e9:.1f} GB/s, plus {1e6 * floor:.0f} us per layer"
    except ValueError as error:
        decoding = f"warning: {error}; measure again on an idle machine"
    return (
        f"{calibration.ranks} x {calibration.device}: all-reduce {1e6 * latency:.0f} us and {rate} of its tensor\n"
        f"decoding: {decoding}\n"
        f"products {calibration.flops_per_second / 1e12:.3f} TFLOP/s; a reduce gives back "
        f"{100 * calibration.contention:.0f} % of what it runs under"
    )
