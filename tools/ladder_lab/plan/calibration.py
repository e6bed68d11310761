"""The file of `plan.py calibrate`: measurements of one machine, and the figures of a cluster derived from them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ladder_lab.cost.hardware import Cluster
from ladder_lab.cost.links import wire_bytes
from ladder_lab.plan.options import write_output
from megatron_ladder.errors import UserError

FORMAT = "megatron_ladder calibration 1"
REDUCES_OF_A_LAYER = 2
"""Decoding is measured in the standard wiring."""


@dataclass(frozen=True)
class ReduceTime:
    """An all-reduce over all ranks."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class DecodeTime:
    """The decoding of one token at batch size 1, in the standard wiring, tensor-parallel over all ranks.

    A rank reads `weight_bytes` of weights, and reduces tensors of `stream_bytes`.
    """

    size: str
    weight_bytes: int
    layers: int
    stream_bytes: int
    seconds: float


@dataclass(frozen=True)
class ProductTime:
    """Matrix products alone, an all-reduce alone, and both together."""

    flops: float
    alone_seconds: float
    reduce_bytes: int
    reduce_seconds: float
    together_seconds: float


@dataclass(frozen=True)
class ClusterCalibration:
    """All measurements of one machine.

    Decoding is measured at two sizes; one size cannot separate the cost of a layer from the cost of its weights.
    """

    device: str
    ranks: int
    reduces: tuple[ReduceTime, ...]
    decodes: tuple[DecodeTime, ...]
    product: ProductTime

    @property
    def flops_per_second(self) -> float:
        """Rate of matrix products."""
        return self.product.flops / self.product.alone_seconds

    @property
    def link(self) -> tuple[float, float]:
        """Latency in seconds, and seconds per byte: least squares of the relative error, neither below 0."""
        return _fit_line([(reduce.num_bytes, reduce.seconds) for reduce in self.reduces])

    @property
    def contention(self) -> float:
        """Share of the overlap that is given back: s in together = max(c, t) + s min(c, t), from 0 to 1."""
        c, t = self.product.alone_seconds, self.product.reduce_seconds
        return min(1.0, max(0.0, (self.product.together_seconds - max(c, t)) / min(c, t)))

    @property
    def decoding(self) -> tuple[float, float]:
        """Bytes of weights that a rank reads per second, and further seconds per layer.

        Solves seconds = weight bytes / rate + layers (floor + 2 reduces) for the two sizes. Raises ValueError if the
        times do not separate the costs, because of noise or because the sizes are too similar.
        """
        latency, per_byte = self.link
        small, large = self.decodes
        known = [
            decode.seconds - REDUCES_OF_A_LAYER * decode.layers * (latency + per_byte * decode.stream_bytes)
            for decode in (small, large)
        ]
        determinant = small.weight_bytes * large.layers - large.weight_bytes * small.layers
        per_weight = (known[0] * large.layers - known[1] * small.layers) / determinant if determinant else 0.0
        if per_weight <= 0:
            raise ValueError("the decode times of the two sizes do not separate weights from layers")
        return 1 / per_weight, max(0.0, (known[1] - per_weight * large.weight_bytes) / large.layers)


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (a, b) of y = a + b x with the smallest sum of squared relative errors, a and b at least 0."""
    x, y = np.array(points, dtype=np.float64).T
    constant, slope = 1 / y, x / y
    (a, b), _, rank, _ = np.linalg.lstsq(np.stack([constant, slope], axis=1), np.ones(len(y)))
    if rank == 2 and a >= 0 and b >= 0:
        return float(a), float(b)
    if rank == 2 and a < 0:
        return 0.0, float(slope.sum() / (slope @ slope))
    return float(constant.sum() / (constant @ constant)), 0.0


def write_calibration(calibration: ClusterCalibration, path: Path) -> None:
    """Write the measurements as JSON, replacing the file."""
    write_output(path, json.dumps({"format": FORMAT, **asdict(calibration)}, indent=1) + "\n")


def read_calibration(path: Path) -> ClusterCalibration:
    """Read a file of `write_calibration`; raise UserError if it is none."""
    where = f"--calibration {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}") from None
    fix = "write one with `plan.py calibrate`"
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f'{where}: expected "format": "{FORMAT}": {fix}')
    try:
        calibration = ClusterCalibration(
            device=str(found["device"]),
            ranks=int(found["ranks"]),
            reduces=tuple(ReduceTime(**reduce) for reduce in found["reduces"]),
            decodes=tuple(DecodeTime(**decode) for decode in found["decodes"]),
            product=ProductTime(**found["product"]),
        )
        product = calibration.product
        seconds = [product.alone_seconds, product.reduce_seconds, product.together_seconds]
        seconds += [timed.seconds for timed in calibration.reduces] + [timed.seconds for timed in calibration.decodes]
        if len(calibration.decodes) != 2 or len(calibration.reduces) < 2 or min(seconds) <= 0 or calibration.ranks < 2:
            raise ValueError("expected 2 or more ranks and reduces, 2 decodes, and times above 0")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: its measurements cannot be read ({error}): {fix}") from None
    return calibration


def apply_calibration(cluster: Cluster, calibration: ClusterCalibration, source: str) -> Cluster:
    """Return the cluster with the measurements instead of its figures; links between nodes keep theirs."""
    try:
        memory_rate, _ = calibration.decoding
    except ValueError as error:
        raise UserError(f"--calibration {source}: {error}: measure again on an idle machine") from None
    latency, per_byte = calibration.link
    size = calibration.product.reduce_bytes
    measured: dict[str, Any] = {
        "flops_share": min(1.0, calibration.flops_per_second / cluster.peak_flops),
        "memory_bytes_per_second": memory_rate,
        "node_base_seconds": latency,
        "node_rank_seconds": 0.0,
        "node_root_seconds": 0.0,
        "node_bytes_per_second": wire_bytes(1, calibration.ranks) / per_byte if per_byte > 0 else float("inf"),
        "contention": min(1.0, calibration.contention * (size + cluster.contention_bytes) / size),
    }
    sources = {**cluster.sources, **dict.fromkeys(measured, f"{source}: {calibration.ranks} x {calibration.device}")}
    return replace(cluster, calibrated=True, sources=sources, **measured)
