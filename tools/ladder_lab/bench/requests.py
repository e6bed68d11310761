"""One rank of `tools/benchmark.py serve`: batches of whole requests in every wiring, next to the paper's figures."""

import contextlib
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass

from ladder_lab.bench.calibration import Prediction
from ladder_lab.bench.comparison import WiringComparison
from ladder_lab.bench.interconnect import start_ranks
from ladder_lab.bench.options import RequestsOptions
from ladder_lab.bench.paired import PairedTimes, RatioVerdict, measure
from ladder_lab.bench.paper import Peers, published_speed
from ladder_lab.bench.results import RequestRow, requests_table
from ladder_lab.bench.sizes import find_size, full_name
from ladder_lab.bench.variants import VARIANTS, Variant, bound_of
from ladder_lab.bench.workloads import Workload, random_ids
from ladder_lab.cost.machines import LINK_ERROR
from megatron_ladder.comm.launch import RankInfo, naming_lost_peers, read_rank_info, stop_process_group
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.files import write_atomically
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY

CALIBRATED_TOKENS = 8
"""Tokens decoded per timing of the calibration."""
PEERS: dict[str, Peers] = {"nvlink": "on", "no-p2p": "off"}
"""The emulated interconnects that are the paper's."""


class _Requests:
    """A batch of equally long prompts, continued by one wiring at a time, so that there is only one cache."""

    def __init__(self, comparison: WiringComparison, options: RequestsOptions, batch: int) -> None:
        self._comparison, self._batch, self._captures = comparison, batch, options.cuda_graph
        self._positions = options.prompt + options.generate
        ids = random_ids(comparison.shape, batch, options.prompt)
        self._requests = [GenerationRequest(tuple(row), options.generate, GREEDY) for row in ids.tolist()]
        self._engine: GenerationEngine | None = None
        self.first_token: dict[str, list[float]] = {variant.name: [] for variant in comparison.compared}
        """Seconds until all prompts have their first token, by variant, with those of the warm-up round."""

    def prepare(self, name: str) -> None:
        """Replace the engine by one of this variant; a captured step has been replayed afterwards."""
        self.close()
        new_graph = CudaStepGraph if self._captures else None
        self._engine = GenerationEngine(self._comparison.models[name], self._comparison.mesh, new_graph=new_graph)
        if self._captures:
            # Short prompts, but of as many positions as the timed requests, so that these reuse the captured step.
            short = GenerationRequest((0,), self._positions - 1, GREEDY)
            with contextlib.closing(self._engine.stream([short] * self._batch)) as stream:
                for _ in range(2 * self._batch):
                    next(stream)
        self._comparison.interconnect.synchronize()
        self._comparison.mesh.world.barrier()

    def run(self, name: str) -> None:
        """Continue all prompts."""
        assert self._engine is not None
        began = time.perf_counter()
        stream = self._engine.stream(self._requests)
        for _ in self._requests:
            next(stream)
        self.first_token[name].append(time.perf_counter() - began)
        for _ in stream:
            pass

    def close(self) -> None:
        """Free cache and captured step."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def time(self, rounds: int, label: str | None) -> PairedTimes:
        """Time all variants in alternation."""
        ways = {name: lambda name=name: self.run(name) for name in self.first_token}
        try:
            return measure(ways, rounds, before_each=self.prepare, label=label)
        finally:
            self.close()


@dataclass(frozen=True)
class _RequestPrediction:
    """The step-time model of a request: its prefill and its decode steps."""

    prefill: Prediction
    decode: Prediction
    prefill_reduce: float
    decode_reduce: float
    """Seconds of an all-reduce."""
    decode_steps: int

    def seconds(self, variant: Variant, factor: float = 1.0) -> float:
        """Return the seconds of a request when all-reduces take `factor` times as long."""
        prefill = self.prefill.seconds(variant, factor * self.prefill_reduce)
        return prefill + self.decode_steps * self.decode.seconds(variant, factor * self.decode_reduce)

    def speed_up(self, variant: Variant, factor: float = 1.0) -> float:
        """Return the speed-up over standard."""
        return self.seconds(VARIANTS["standard"], factor) / self.seconds(variant, factor)


def run_requests(options: RequestsOptions) -> None:
    """Run as one of the ranks; raise BadNumbersError if a ratio exceeds its maximum or is too noisy to judge."""
    if options.p2p == "off":
        # NCCL reads it when the first communicator is made.
        os.environ["NCCL_P2P_DISABLE"] = "1"
    place = read_rank_info()
    with naming_lost_peers():
        rows = _measure(options, place)
    doubtful = [row for row in rows if row.verdict != RatioVerdict.SOUND.value]
    if doubtful and place.rank == 0:
        raise BadNumbersError(
            "; ".join(f"{row.wiring} of {row.size} at batch {row.batch}: {row.verdict}" for row in doubtful)
        )


def _measure(options: RequestsOptions, place: RankInfo) -> list[RequestRow]:
    device = start_ranks(options, place)
    rows: list[RequestRow] = []
    for size in options.sizes:
        comparison = WiringComparison(options, find_size(size), place, device)
        for batch in options.batch:
            for text in (*options.alpha, *options.link_preset):
                new = _rows(comparison, options, size, batch, text)
                rows += new
                if place.rank == 0:
                    print(f"\n{_heading(comparison, options, size, new[0])}\n\n{requests_table(new)}", flush=True)
        comparison.interconnect.close()
    if place.rank == 0 and options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    stop_process_group()
    return rows


def _heading(comparison: WiringComparison, options: RequestsOptions, size: str, row: RequestRow) -> str:
    return (
        f"{size}, batch {row.batch}, {row.prompt} prompt tokens, {row.generate} new tokens, "
        f"{comparison.interconnect.describe(options)}, all-reduce {row.alpha} = "
        f"{1e3 * row.decode_reduce_seconds:.3f} ms in decode, {1e3 * row.prefill_reduce_seconds:.3f} ms in prefill"
    )


def _predict(comparison: WiringComparison, options: RequestsOptions, batch: int, text: str) -> _RequestPrediction:
    """Calibrate the passes of a request; attention covers as many positions as in the mean decode step."""
    sequence = options.prompt + options.generate // 2
    decode = Workload("decode", batch, sequence, CALIBRATED_TOKENS, options.cuda_graph)
    prefill = Workload("prefill", batch, options.prompt)
    of_decode, of_prefill = comparison.calibrate(decode), comparison.calibrate(prefill)
    decode_reduce = comparison.reduce_seconds(decode, text, of_decode)
    # A multiple of a sub-block's time is one of the decode step.
    fixed = text if text in options.link_preset or options.own_interconnect else f"{decode_reduce}s"
    prefill_reduce = comparison.reduce_seconds(prefill, fixed, of_prefill)
    sizes = comparison.message_bytes(decode), comparison.message_bytes(prefill)
    per_byte = (prefill_reduce - decode_reduce) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    comparison.interconnect.set_wire(decode_reduce - per_byte * sizes[0], per_byte)
    return _RequestPrediction(of_prefill, of_decode, prefill_reduce, decode_reduce, options.generate - 1)


def _rows(comparison: WiringComparison, options: RequestsOptions, size: str, batch: int, text: str) -> list[RequestRow]:
    """Measure all wirings at one batch size and interconnect."""
    prediction = _predict(comparison, options, batch, text)
    requests = _Requests(comparison, options, batch)
    times = requests.time(options.rounds, comparison.label(f"{size}, batch {batch}, {text}"))
    peers = options.p2p if options.own_interconnect else PEERS.get(text)
    rows = []
    for variant in comparison.compared:
        name = variant.name
        ratio, bound = times.ratio("standard", name), times.ratio("standard", bound_of(variant).name)
        seconds, first = times.median(name), statistics.median(requests.first_token[name][-options.rounds :])
        ends = [prediction.speed_up(variant, factor) for factor in (1 / LINK_ERROR, LINK_ERROR)]
        published = published_speed(
            full_name(size), name, peers, options.ranks, batch, options.prompt, options.generate
        )
        rows.append(
            RequestRow(
                size=size,
                wiring=name,
                interconnect=comparison.interconnect.name + (" without P2P" if options.p2p == "off" else ""),
                alpha=text,
                decode_reduce_seconds=prediction.decode_reduce,
                prefill_reduce_seconds=prediction.prefill_reduce,
                ranks=options.ranks,
                batch=batch,
                prompt=options.prompt,
                generate=options.generate,
                tokens_per_second=batch * options.generate / seconds,
                first_token_seconds=first,
                decode_step_seconds=(seconds - first) / (options.generate - 1),
                speed_up=ratio.median,
                spread=ratio.spread,
                predicted=prediction.speed_up(variant),
                predicted_range=(min(ends), max(ends)),
                published_tokens_per_second=published.tokens_per_second,
                published_speed_up=published.speed_up,
                verdict=ratio.verdict(bound.median + bound.spread).value,
            )
        )
    return rows
