"""Study: may a rank read its own partial outputs at once, while the sums of the other ranks' are in flight?

    python docs/study/own_partials.py --results FILE                 all stages; three hours on two cores
    python docs/study/own_partials.py --results FILE --stages report

With s sub-blocks in flight, sub-block i of a late-reading model reads r, the stream without the last s outputs. With
own partials, lane k reads r plus its own parts y_j^k of those outputs:

    x_i^k = r + sum over the last s outputs j of y_j^k          y_j = sum over k of y_j^k

The model is a plain one, on one process that computes all lanes, so autograd gives the gradients. It shares no code
with the package's models.

Stages: `train` trains standard models of two sizes at 20 tokens per parameter, with the learning rate tuned over the
whole run at the smaller one. Each of them is then evaluated with the other wirings, without further training. `arrange`
trains the standard models of the smaller size again, and evaluates them with heads and neurons exchanged such that
those which affect each other share a lane. `scratch` trains every wiring at the smaller size, tuned in the same way.
`report` prints the tables of what exists.

The text is Python's standard library, as bytes. FILE receives the result of each trial, and a trial with a result is
skipped, so the same command continues after an interruption.
"""

import argparse
import functools
import json
import math
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from results import Result, Results, Search, interval, search
from scipy.optimize import linear_sum_assignment
from torch import Tensor

VOCABULARY, POSITIONS, ROWS, LAYERS, HEADS = 256, 128, 32, 12, 8
TOKENS_PER_PARAMETER = 20
HELD_OUT_BATCHES = 32
SIZES = {"small": (32, 88), "large": (48, 128)}
"""Hidden size and width of the MLP."""
RATES = (8e-3, 1.6e-2, 3.2e-2)
"""Learning rates at the small size, and further ones while the best is the lowest or highest. The large size has the
best of standard times the ratio of the hidden sizes."""
SEEDS = (1, 2, 3)
LANES, STALENESS = (2, 4, 8), (1, 2, 4)
CALIBRATION_BATCHES, SWEEPS = 4, 10
STAGES = ("train", "arrange", "scratch", "report")

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Wiring:
    """What a sub-block reads."""

    staleness: int = 0
    lanes: int = 1
    """1: the outputs in flight are missing; otherwise, each lane has its own part of them."""

    @property
    def name(self) -> str:
        if self.staleness == 0:
            return "standard"
        return f"ladder-{self.staleness}" if self.lanes == 1 else f"own-{self.staleness}-of-{self.lanes}"


@dataclass(frozen=True)
class Trial:
    """One training run."""

    size: str
    wiring: Wiring
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.wiring.name}-{self.rate:g}-{self.seed}"


def init_weights(size: str, seed: int) -> Weights:
    """Return random weights; all wirings begin with the same ones."""
    hidden, inner = SIZES[size]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 0.02) -> Tensor:
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    weights = {"embedding": draw(VOCABULARY, hidden), "head": draw(VOCABULARY, hidden), "norm": torch.ones(hidden)}
    to_stream = 0.02 / math.sqrt(2 * LAYERS)
    for layer in range(LAYERS):
        weights |= {
            f"{layer}.attention.norm": torch.ones(hidden),
            f"{layer}.attention.in": draw(3, hidden, hidden, std=hidden**-0.5),
            f"{layer}.attention.out": draw(hidden, hidden, std=to_stream),
            f"{layer}.mlp.norm": torch.ones(hidden),
            f"{layer}.mlp.in": draw(2, hidden, inner, std=hidden**-0.5),
            f"{layer}.mlp.out": draw(inner, hidden, std=to_stream),
        }
    return weights


@functools.cache
def rotary(head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(POSITIONS), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Rotate [..., positions, head_dim] by the positions."""
    cos, sin = rotary(x.shape[-1])
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def inner_activations(weights: Weights, name: str, x: Tensor, lanes: int) -> Tensor:
    """Map streams [1 or lanes, rows, positions, hidden] to the input of each lane's part of the output matrix."""
    normed = F.rms_norm(x, x.shape[-1:], weights[f"{name}.norm"], 1e-5)
    # Lane k has the k-th range of the columns of the input matrices, and of the rows of the output matrix.
    stacked = weights[f"{name}.in"]
    parts, hidden, width = stacked.shape
    into = stacked.view(parts, hidden, lanes, width // lanes).permute(2, 1, 0, 3).reshape(lanes, hidden, -1)
    flat = normed.flatten(1, 2).expand(lanes, -1, -1)
    found = torch.bmm(flat, into).view(lanes, *x.shape[1:3], parts, width // lanes).unbind(-2)
    if parts == 3:
        q, k, v = (each.unflatten(-1, (HEADS // lanes, -1)).transpose(-2, -3).flatten(0, 1) for each in found)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return mixed.unflatten(0, (lanes, -1)).transpose(-2, -3).flatten(-2)
    return F.silu(found[0]) * found[1]


def outputs(weights: Weights, name: str, x: Tensor, lanes: int) -> Tensor:
    """Compute a sub-block for streams [1 or lanes, rows, positions, hidden]; return each lane's part of its output."""
    inner, out = inner_activations(weights, name, x, lanes), weights[f"{name}.out"]
    return torch.bmm(inner.flatten(1, 2), out.view(lanes, -1, x.shape[-1])).view(lanes, *x.shape[1:])


def logits(weights: Weights, ids: Tensor, wiring: Wiring) -> Tensor:
    """Return logits [rows, positions, vocabulary]."""
    stream = F.embedding(ids, weights["embedding"])
    in_flight: deque[Tensor] = deque()
    for number in range(2 * LAYERS):
        while len(in_flight) > wiring.staleness:
            stream = stream + in_flight.popleft().sum(0)
        read = stream.unsqueeze(0)
        if wiring.lanes > 1:
            for own in in_flight:
                read = read + own
        name = f"{number // 2}.{('attention', 'mlp')[number % 2]}"
        in_flight.append(outputs(weights, name, read, wiring.lanes))
    for output in in_flight:
        stream = stream + output.sum(0)
    return F.rms_norm(stream, stream.shape[-1:], weights["norm"], 1e-5) @ weights["head"].t()


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes for training, and the held-out files."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(paths)
    cut = len(paths) // 20
    joined = (b"\0".join(path.read_bytes() for path in part) for part in (paths[cut:], paths[:cut]))
    training, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in joined)
    return training, held_out


def batch(text: Tensor, seed: str) -> Tensor:
    """Return random rows [rows, positions + 1]."""
    begins = random.Random(seed)
    rows = (begins.randrange(len(text) - POSITIONS) for _ in range(ROWS))
    return torch.stack([text[begin : begin + POSITIONS + 1] for begin in rows])


def loss_of(weights: Weights, rows: Tensor, wiring: Wiring) -> Tensor:
    """Return the mean loss in nats."""
    return F.cross_entropy(logits(weights, rows[:, :-1], wiring).flatten(0, 1), rows[:, 1:].flatten())


def held_out_rows() -> Iterator[Tensor]:
    """Iterate over the batches of the held-out text."""
    return (batch(texts()[1], f"held out {number}") for number in range(HELD_OUT_BATCHES))


def steps_of(weights: Weights) -> int:
    """Return the length of a run."""
    parameters = sum(weight.numel() for weight in weights.values())
    return round(TOKENS_PER_PARAMETER * parameters / (ROWS * POSITIONS))


def train(trial: Trial) -> Weights:
    """Train one model."""
    weights = {name: weight.requires_grad_() for name, weight in init_weights(trial.size, trial.seed).items()}
    steps = steps_of(weights)
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=trial.rate, betas=(0.9, 0.95), fused=True)
    warmup = steps // 20
    begun = time.monotonic()
    for step in range(steps):
        progress = max(0.0, (step - warmup) / (steps - warmup))
        factor = min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = trial.rate * factor
        loss = loss_of(weights, batch(texts()[0], f"{trial.seed} {step}"), trial.wiring)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            left = (time.monotonic() - begun) / (step + 1) * (steps - step - 1) / 60
            print(f"{trial.name}: step {step}/{steps}, loss {loss.item():.3f}, {left:.0f} min left", file=sys.stderr)
    return {name: weight.detach() for name, weight in weights.items()}


def run_trial(trial: Trial, is_arranged: bool) -> Result:
    """Train one model, and measure what its stage needs."""
    trained = train(trial)
    result: Result = {"steps": steps_of(trained)}
    if is_arranged:
        return result | {"loss": held_out_loss(trained, Wiring()), "arranged": rewire_arranged(trained)}
    if trial.wiring != Wiring():
        return result | {"loss": held_out_loss(trained, trial.wiring)}
    return result | rewire(trained)


@torch.no_grad()
def held_out_loss(weights: Weights, wiring: Wiring) -> float:
    """Return the loss of the held-out text."""
    return statistics.fmean(loss_of(weights, rows, wiring).item() for rows in held_out_rows())


@torch.no_grad()
def rewire(weights: Weights) -> Result:
    """Measure a standard model's loss, and its increase and the share of unchanged likeliest bytes with each wiring."""
    rows = list(held_out_rows())
    expected = [logits(weights, each[:, :-1], Wiring()) for each in rows]

    def cross_entropy(found: Sequence[Tensor]) -> float:
        pairs = zip(found, rows, strict=True)
        return statistics.fmean(F.cross_entropy(one.flatten(0, 1), each[:, 1:].flatten()).item() for one, each in pairs)

    loss, rewired = cross_entropy(expected), {}
    for wiring in (Wiring(stale, lanes) for stale in STALENESS for lanes in (1, *LANES)):
        found = [logits(weights, each[:, :-1], wiring) for each in rows]
        pairs = zip(found, expected, strict=True)
        same = [(one.argmax(-1) == other.argmax(-1)).float().mean().item() for one, other in pairs]
        rewired[wiring.name] = {"increase": cross_entropy(found) - loss, "unchanged": statistics.fmean(same)}
    return {"loss": loss, "rewired": rewired}


Activations = list[tuple[Tensor, Tensor]]
"""For each sub-block, the input of its output matrix [tokens, width], and 1 / rms of what it reads [tokens]."""


def parts_of(weights: Weights, number: int) -> tuple[str, Tensor]:
    """Return the name of a sub-block, and the columns of each of its units [units, columns]: a head or a neuron."""
    name = f"{number // 2}.{('attention', 'mlp')[number % 2]}"
    width = weights[f"{name}.in"].shape[2]
    return name, torch.arange(width).view(width if number % 2 else HEADS, -1)


def activations(weights: Weights, ids: Tensor) -> Activations:
    """Run the standard model."""
    found = []
    stream = F.embedding(ids, weights["embedding"])
    for number in range(2 * LAYERS):
        name, _ = parts_of(weights, number)
        inner = inner_activations(weights, name, stream.unsqueeze(0), 1)[0]
        found.append((inner.flatten(0, 1), stream.pow(2).mean(-1).add(1e-5).rsqrt().flatten()))
        stream = stream + inner @ weights[f"{name}.out"]
    return found


def effects(weights: Weights, recorded: Activations, producer: int, consumer: int) -> Tensor:
    """Return the mean squared effect of each unit of a sub-block on each of a later one, [units, later units]."""
    (name, units), (later_name, later_units) = parts_of(weights, producer), parts_of(weights, consumer)
    inner = recorded[producer][0] * recorded[consumer][1].unsqueeze(-1)
    matrices = (weights[f"{name}.out"] * weights[f"{later_name}.norm"]) @ weights[f"{later_name}.in"]
    found = torch.zeros(len(units), len(later_units))
    for unit, columns in enumerate(units):
        moments = inner[:, columns].t() @ inner[:, columns] / len(inner)
        for matrix in matrices[:, columns]:
            found[unit] += (matrix * (moments @ matrix)).sum(0)[later_units].sum(1)
    return found


def arrange(weights: Weights, recorded: Activations, wiring: Wiring) -> Weights:
    """Exchange units so that the effects of outputs in flight are in one lane as far as possible."""
    count, lanes = 2 * LAYERS, wiring.lanes
    pairs = {
        (producer, consumer): effects(weights, recorded, producer, consumer)
        for producer in range(count)
        for consumer in range(producer + 1, min(count, producer + wiring.staleness + 1))
    }
    sizes = [len(parts_of(weights, number)[1]) for number in range(count)]
    lane_of = [torch.arange(size) * lanes // size for size in sizes]
    for _ in range(SWEEPS):
        for number, size in enumerate(sizes):
            gains = torch.zeros(size, lanes)
            for (producer, consumer), found in pairs.items():
                if number == producer:
                    gains += found @ F.one_hot(lane_of[consumer], lanes).float()
                if number == consumer:
                    gains += found.t() @ F.one_hot(lane_of[producer], lanes).float()
            places = gains.repeat_interleave(size // lanes, dim=1)
            _, chosen = linear_sum_assignment(places.numpy(), maximize=True)
            lane_of[number] = torch.from_numpy(chosen) // (size // lanes)
    arranged = dict(weights)
    for number, lane in enumerate(lane_of):
        name, units = parts_of(weights, number)
        columns = units[lane.argsort(stable=True)].flatten()
        arranged |= {f"{name}.in": weights[f"{name}.in"][..., columns], f"{name}.out": weights[f"{name}.out"][columns]}
    return arranged


@torch.no_grad()
def rewire_arranged(weights: Weights) -> Result:
    """Measure the increase of a standard model's loss with own partials, with its units exchanged."""
    ids = torch.cat([batch(texts()[0], f"calibration {number}") for number in range(CALIBRATION_BATCHES)])[:, :-1]
    recorded, base = activations(weights, ids), held_out_loss(weights, Wiring())
    return {
        wiring.name: held_out_loss(arrange(weights, recorded, wiring), wiring) - base
        for wiring in (Wiring(stale, lanes) for stale in STALENESS for lanes in LANES)
    }


def rates(results: Results, wiring: Wiring) -> Search:
    """Return the state of the search for the learning rate of a wiring, with the first seed at the small size."""
    return search(results, RATES, lambda rate: Trial("small", wiring, rate, SEEDS[0]).name)


def tune(wirings: Sequence[Wiring], results: Results, jobs: int) -> None:
    """Train every wiring with the first seed until the search for its learning rate has ended."""
    while missing := [
        Trial("small", wiring, rate, SEEDS[0]) for wiring in wirings for rate in rates(results, wiring).missing
    ]:
        run_trials(missing, results, jobs)


def at_best_rate(results: Results, wiring: Wiring) -> list[Trial]:
    """Return the trials at the small size whose rate was chosen; none before that."""
    best = rates(results, wiring).best
    return [] if best is None else [Trial("small", wiring, best, seed) for seed in SEEDS]


def losses_by_seed(results: Results, wiring: Wiring) -> dict[int, float]:
    """Return the losses of a wiring that was trained from scratch."""
    found = {trial.seed: results.of(trial.name) for trial in at_best_rate(results, wiring)}
    return {seed: result["loss"] for seed, result in found.items() if result is not None}


def base_trials(results: Results) -> list[Trial]:
    """Return the standard models of both sizes that are rewired."""
    small = at_best_rate(results, Wiring())
    scale = SIZES["small"][0] / SIZES["large"][0]
    return [*small, *(Trial("large", Wiring(), round(trial.rate * scale, 6), trial.seed) for trial in small)]


def scratch_wirings() -> Iterator[Wiring]:
    """Iterate over the wirings that are trained from scratch."""
    yield Wiring()
    for stale in (1, 2):
        yield from (Wiring(stale, lanes) for lanes in (1, 4, 8))


def arranged_name(trial: Trial) -> str:
    """Return the name of a trial of the stage `arrange`."""
    return f"{trial.name}-arranged"


def run_trials(trials: Sequence[Trial], results: Results, jobs: int, is_arranged: bool = False) -> None:
    """Train what is missing, in processes with one thread each."""

    def run(trial: Trial) -> None:
        name = arranged_name(trial) if is_arranged else trial.name
        if results.of(name) is not None:
            return
        wiring = trial.wiring
        words = [trial.size, wiring.staleness, wiring.lanes, trial.rate, trial.seed, int(is_arranged)]
        command = [sys.executable, __file__, "--trial", *map(str, words)]
        results.add(name, json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))

    with ThreadPoolExecutor(jobs) as processes:
        list(processes.map(run, trials))


def report(results: Results) -> None:
    """Print the tables of everything that has been measured."""
    print("| model | wiring | seeds | increase of the loss | range | likeliest byte unchanged |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        ended = [results.of(trial.name) for trial in base_trials(results) if trial.size == size]
        found = [result["rewired"] for result in ended if result is not None]
        for name in found[0] if found else ():
            increases = [each[name]["increase"] for each in found]
            unchanged = statistics.fmean(each[name]["unchanged"] for each in found)
            span = f"{min(increases):.4f} to {max(increases):.4f}"
            print(f"| {size} | {name} | {len(found)} | {statistics.fmean(increases):.4f} | {span} | {unchanged:.1%} |")
    print("\n| wiring | seeds | increase of the loss | arranged | of the increase remain |\n|---|---|---|---|---|")
    both = [(results.of(trial.name), results.of(arranged_name(trial))) for trial in at_best_rate(results, Wiring())]
    pairs = [(plain["rewired"], arranged["arranged"]) for plain, arranged in both if plain and arranged]
    for name in pairs[0][1] if pairs else ():
        plain, arranged = ([one[name]["increase"] for one, _ in pairs], [other[name] for _, other in pairs])
        means = statistics.fmean(plain), statistics.fmean(arranged)
        shares = [after / before for before, after in zip(plain, arranged, strict=True)]
        span = f"{min(shares):.0%} to {max(shares):.0%}"
        print(f"| {name} | {len(pairs)} | {means[0]:.4f} | {means[1]:.4f} | {span} |")
    print("\n| model | wiring | rate | seed | loss |\n|---|---|---|---|---|")
    for wiring in scratch_wirings():
        tuning = [Trial("small", wiring, rate, SEEDS[0]) for rate in rates(results, wiring).losses]
        large = [trial for trial in base_trials(results) if trial.size == "large" and trial.wiring == wiring]
        for trial in dict.fromkeys([*tuning, *at_best_rate(results, wiring), *large]):
            if (result := results.of(trial.name)) is not None:
                print(f"| {trial.size} | {wiring.name} | {trial.rate:g} | {trial.seed} | {result['loss']:.4f} |")
    print("\n| wiring | rate | loss | less standard's | less ladder's, as many in flight |\n|---|---|---|---|---|")
    standard = losses_by_seed(results, Wiring())
    for wiring in scratch_wirings():
        if losses := losses_by_seed(results, wiring):
            ladder = losses_by_seed(results, Wiring(wiring.staleness))
            less = (
                interval([losses[seed] - others[seed] for seed in losses if seed in others])
                for others in (standard, ladder)
            )
            rate, loss = rates(results, wiring).best, statistics.fmean(losses.values())
            print(f"| {wiring.name} | {rate:g} | {loss:.4f} | {' | '.join(less)} |")


def main() -> None:
    """Run the stages, or one trial of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, help="JSON file of results, which is continued")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--jobs", type=int, default=2, help="training runs at a time, with one thread each")
    parser.add_argument("--trial", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trial is not None:
        size, staleness, lanes, rate, seed, is_arranged = options.trial
        trial = Trial(size, Wiring(int(staleness), int(lanes)), float(rate), int(seed))
        print(json.dumps(run_trial(trial, is_arranged=is_arranged == "1")))
        return
    if options.results is None:
        parser.error("--results: pass a file")
    results = Results(options.results)
    if "train" in options.stages:
        tune([Wiring()], results, options.jobs)
        run_trials(base_trials(results), results, options.jobs)
    if "arrange" in options.stages:
        run_trials(at_best_rate(results, Wiring()), results, options.jobs, is_arranged=True)
    if "scratch" in options.stages:
        wirings = list(scratch_wirings())
        tune(wirings, results, options.jobs)
        run_trials([trial for wiring in wirings for trial in at_best_rate(results, wiring)], results, options.jobs)
    if "report" in options.stages:
        report(results)


if __name__ == "__main__":
    main()
