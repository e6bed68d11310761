"""Chooses which heads and neurons share a lane: `convert_checkpoint.py arrange`.

With own partials, lane k reads its own parts of the outputs in flight and misses the other lanes' parts. A unit (a
key-value head with its query heads, or a neuron) should therefore be in the lane of the units that it affects the most.
With z_u the activations of unit u, O_u the columns of the output matrix that they are multiplied with, and W_v the rows
of the input matrices of unit v, the effect of u on v in a sub-block whose norm has the factor g and divides by rms is

    E |W_v diag(g) O_u z_u|^2 E[1 / rms^2] = tr(S_u M M^T) E[1 / rms^2]    S_u = E[z_u z_u^T],  M = O_u^T diag(g) W_v^T

The lanes are chosen sub-block by sub-block such that the sum of the effects inside lanes grows, given the lanes of all
other sub-blocks: an assignment problem, since every lane has equally many units. Effects of different units are added
as if they were independent. The sum over the units of a lane is one [h, h] matrix.

Exchanging units does not change what the model computes without own partials.
"""

import functools
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.blueprint.tensors import layer_tensors
from megatron_ladder.comm.launch import read_rank_info
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.copying import Permutation
from megatron_ladder.convert.options import ArrangeOptions
from megatron_ladder.convert.sensitivity import read_batches, run_model
from megatron_ladder.convert.wiring import rewired
from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.errors import BadNumbersError, Problem, UserError, raise_user_errors
from megatron_ladder.generate.loading import DTYPES, open_model
from megatron_ladder.generate.slots import BAD_NUMBERS_CAUSE
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections
from megatron_ladder.parallel.linear import RowParallelLinear
from megatron_ladder.progress import ProgressBar

_NOTHING_IN_FLIGHT = Problem(
    {"ladder_layers": None}, "{}: nothing reads while an output is in flight", "give other or more layers"
)
_MOST_SWEEPS = 10
_LEAST_GAIN = 0.002
"""The sweeps end when one adds less than this share of all effects."""
_UNITS_AT_ONCE = 1024
"""Units of one assignment problem, whose time grows with the third power."""


class _Units:
    """The units of one branch of a sub-block."""

    def __init__(self, branch: Branch, norm: Tensor, epsilon: float, weights: Mapping[str, Tensor], lanes: int) -> None:
        """`norm` is the factor of the norm [h], and `epsilon` what it adds to mean squares; `weights` are by name."""
        self.branch = branch
        self.count = min(matrix.weight.heads or matrix.weight.shape[0] for matrix in branch.inputs.values())
        self.lanes: NDArray[np.int64] = np.arange(self.count) * lanes // self.count
        """The lane of each unit."""
        self.moments = torch.zeros(())
        """The sum of z z^T over all tokens, [units, columns of a unit, columns of a unit]."""
        self.inverse_square = torch.zeros(())
        """The sum of 1 / rms^2 over all tokens."""
        self.norm = norm
        self.epsilon = epsilon
        self.read_by: list[_Units] = []
        """Units of later sub-blocks that read while the outputs of these are in flight."""
        self.reads: list[_Units] = []
        """Units of earlier sub-blocks whose outputs are in flight when these read."""
        self._weights = weights

    def inputs(self, members: NDArray[np.bool_] | slice = slice(None)) -> Tensor:
        """Return W diag(g) of some units, [units, rows of a unit, h]."""
        matrices = (self._weights[matrix.weight.name] for matrix in self.branch.inputs.values())
        rows = [matrix.unflatten(0, (self.count, -1))[members].float() for matrix in matrices]
        return torch.cat(rows, dim=1) * self.norm.float()

    def outputs(self, members: NDArray[np.bool_] | slice = slice(None)) -> Tensor:
        """Return O^T of some units, [units, columns of a unit, h]."""
        return self._weights[self.branch.output.weight.name].t().unflatten(0, (self.count, -1))[members].float()

    def consumed(self, lane: int) -> Tensor:
        """Return the sum over a lane's units of diag(g) W^T W diag(g) / rms^2, [h, h]."""
        rows = self.inputs(self.lanes == lane).flatten(0, 1)
        return rows.t() @ rows * self.inverse_square

    def produced(self, lane: int) -> Tensor:
        """Return the sum over a lane's units of O S O^T, [h, h]."""
        members = self.lanes == lane
        outputs = self.outputs(members)
        return (self.moments[members] @ outputs).flatten(0, 1).t() @ outputs.flatten(0, 1)

    def effects_on(self, lanes: int) -> Tensor:
        """Return the effect of each unit on later units, by the lane of those, [units, lanes]."""
        outputs = self.outputs()
        consumed = (self._sum(units.consumed(lane) for units in self.read_by) for lane in range(lanes))
        effects = [(outputs @ matrix @ outputs.transpose(1, 2) * self.moments).sum((1, 2)) for matrix in consumed]
        return torch.stack(effects, 1)

    def effects_of(self, lanes: int) -> Tensor:
        """Return the effects of earlier units on each unit, by the lane of those, [units, lanes]."""
        inputs = self.inputs()
        produced = (self._sum(units.produced(lane) for units in self.reads) for lane in range(lanes))
        return torch.stack([(inputs @ matrix * inputs).sum((1, 2)) * self.inverse_square for matrix in produced], 1)

    def _sum(self, matrices: Iterable[Tensor]) -> Tensor:
        """Return the sum of matrices [h, h], of which there may be none."""
        nothing = self.norm.new_zeros(len(self.norm), len(self.norm), dtype=torch.float32)
        return functools.reduce(torch.add, matrices, nothing)

    def record_activations(self, _: object, args: tuple[Tensor, ...]) -> None:
        """Add the moments of the input [s, b, width] of the output projection."""
        z = args[0].float().flatten(0, 1).unflatten(1, (self.count, -1))
        self.moments = self.moments + torch.einsum("nuv,nuw->uvw", z, z)

    def record_read(self, _: object, args: tuple[Tensor, ...], result: Any) -> None:
        """Add 1 / rms^2 of the input [s, b, h] of the norm, which returns it if it has added an output to it."""
        stream = result[0] if isinstance(result, tuple) else args[0]
        self.inverse_square = self.inverse_square + (1 / (stream.float().pow(2).mean(-1) + self.epsilon)).sum()

    def orders(self) -> Iterator[tuple[str, Permutation]]:
        """Yield the new order of the rows or columns of each tensor, lane after lane."""
        units = np.argsort(self.lanes, kind="stable")

        def of(size: int) -> NDArray[np.int64]:
            return np.arange(size).reshape(self.count, -1)[units].reshape(-1)

        of_inputs = (tensor for matrix in self.branch.inputs.values() for tensor in matrix.tensors)
        of_heads = (tensor for tensor in self.branch.inner.values() if tensor.sharded_dim == 0)
        for tensor in (*of_inputs, *of_heads):
            yield tensor.name, Permutation(0, of(tensor.shape[0]))
        output = self.branch.output.weight
        yield output.name, Permutation(1, of(output.shape[1]))


@torch.inference_mode()
def arrange(options: ArrangeOptions) -> Mapping[str, Permutation]:
    """Return the new order of the rows or columns of each tensor, by canonical name; none in a dry run.

    Raises UserError if the model or the data cannot be used, or the flags request no lanes.
    """
    if importlib.util.find_spec("scipy") is None:
        raise UserError("arrange assigns units to lanes with scipy: pip install 'megatron-ladder[lab]'")
    stored = open_model(options.load, None, None, "load")
    target = _arranged_model(stored.config, options)
    batches = read_batches(options, stored)
    if options.dry_run:
        return {}
    device = read_rank_info().device()
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    model = LanguageModel(stored.config, ProcessMesh.single(), dtype=dtype, device=device)
    stored.fill(model)
    all_units = _measure(model, target, batches)
    before = _share_inside(all_units, target.lanes)
    after = _improve(all_units, target.lanes, before)
    print(f"effects of outputs in flight that are inside a lane: {before:.1%} before, {after:.1%} after", flush=True)
    return dict(order for units in all_units for order in units.orders())


def _arranged_model(model: ModelConfig, options: ArrangeOptions) -> ModelConfig:
    """Return the model with lanes. Raises UserError if there is nothing to arrange."""
    if model.lanes or model.wiring.stream == "per rank":
        reason = "{load}: the model depends on which heads and neurons share a rank, so they cannot be exchanged"
        raise UserError(Problem({"load": options.load}, reason, "arrange the model that it was made from"))
    target = rewired(model, options)[0]
    if options.lanes is None or options.lanes < 2:
        raise UserError(Problem({"lanes": options.lanes}, "{lanes}: give the number of lanes to arrange, at least 2"))
    if not target.lanes:
        raise UserError(_NOTHING_IN_FLIGHT)
    shared = "{{lanes}}: the model has {} {}, and lanes that share one cannot be arranged"
    raise_user_errors(
        Problem({"lanes": target.lanes}, shared.format(count, heads), "give a divisor of that number")
        for heads, count in target.key_heads.items()
        if count % target.lanes
    )
    return target


def _measure(model: LanguageModel, target: ModelConfig, batches: Sequence[MicroBatch]) -> list[_Units]:
    """Run the model over the data; return the units of each branch with everything that the choice depends on."""
    weights = {
        section.name: section.view(parameter)
        for parameter, sections in parameter_sections(model)
        for section in sections
    }
    described = [tensors for layer in layer_tensors(target) for tensors in layer]
    outputs = {
        module.sections["weight"][0].name: module for module in model.modules() if isinstance(module, RowParallelLinear)
    }
    hooks = list[Any]()
    by_sub_block = list[list[_Units]]()
    for step, tensors in zip(model.stack.sub_blocks(), described, strict=True):
        norm = weights[tensors.norm.name] + tensors.norm.offset
        branches = [_Units(branch, norm, target.norm_epsilon, weights, target.lanes) for branch in tensors.branches]
        for units in branches:
            output = outputs[units.branch.output.weight.name]
            hooks.append(output.register_forward_pre_hook(units.record_activations))
            hooks.append(step.norm.register_forward_hook(units.record_read))
            missing = [back for back in reversed(tensors.wired.missing) if back <= len(by_sub_block)]
            units.reads = [earlier for back in missing for earlier in by_sub_block[-back]]
            for earlier in units.reads:
                earlier.read_by.append(units)
        by_sub_block.append(branches)
    all_units = [units for branches in by_sub_block for units in branches]
    if not any(units.reads for units in all_units):
        raise UserError(_NOTHING_IN_FLIGHT)
    with ProgressBar("measuring activations", len(batches), "batch") as bar:
        for batch in batches:
            run_model(model, batch)
            bar.advance(1)
    for hook in hooks:
        hook.remove()
    return all_units


def _share_inside(all_units: Sequence[_Units], lanes: int) -> float:
    """Return the share of all effects on later sub-blocks that is inside a lane."""
    inside = total = 0.0
    for units in all_units:
        effects = units.effects_on(lanes)
        inside += float(effects.gather(1, torch.from_numpy(units.lanes).to(effects.device).unsqueeze(1)).sum())
        total += float(effects.sum())
    # NaN fails, too.
    if not 0 < total < math.inf:
        raise BadNumbersError(f"the activations are not finite, or all zero: {BAD_NUMBERS_CAUSE}")
    return inside / total


def _improve(all_units: Sequence[_Units], lanes: int, share: float) -> float:
    """Move units to other lanes until the gain of a sweep is small; return the share inside lanes."""
    with ProgressBar("arranging", _MOST_SWEEPS * len(all_units), "branch") as bar:
        for _ in range(_MOST_SWEEPS):
            for units in all_units:
                units.lanes = _assign((units.effects_on(lanes) + units.effects_of(lanes)).cpu().numpy())
                bar.advance(1)
            before = share
            share = _share_inside(all_units, lanes)
            if share - before < _LEAST_GAIN:
                break
    return share


def _assign(gains: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the lane of each unit that maximises the sum of `gains` [units, lanes]; every lane has as many units."""
    # Imported here because scipy comes with the extra [lab].
    from scipy.optimize import linear_sum_assignment

    units, lanes = gains.shape
    lane_of = np.empty(units, np.int64)
    problems = -(-units // _UNITS_AT_ONCE)
    # Every problem has a multiple of `lanes` units, from everywhere in the branch.
    for first in range(problems):
        members = np.arange(units).reshape(-1, lanes)[first::problems].reshape(-1)
        per_lane = len(members) // lanes
        rows, columns = linear_sum_assignment(np.repeat(gains[members], per_lane, axis=1), maximize=True)
        lane_of[members[rows]] = columns // per_lane
    return lane_of
