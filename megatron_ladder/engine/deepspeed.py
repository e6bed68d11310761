"""DeepSpeed, for ZeRO 2 and 3 and for offloaded optimizers; no other file of the package imports it.

It is called by its public interface, except for the parts in `PRIVATE_PARTS`. `parallel/` also reads the `ds_id` and
`ds_shape` of a parameter that ZeRO 3 has partitioned, if it has them.
"""

import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.engine import Engine, ModelInputs
from megatron_ladder.engine.state import GROUP_MOMENTS, ZeroOptimizer
from megatron_ladder.errors import Problem
from megatron_ladder.model.language_model import LanguageModel, LossScales, StageInputs
from megatron_ladder.model.stats import PassStats, StepStats
from megatron_ladder.parallel.layout import Section

PRIVATE_PARTS = {
    "ops": {
        # A killed build leaves a lock on which all later runs wait. Nothing here uses the operator.
        "__compatible_ops__": "keeps it from compiling an operator for shared-memory collectives",
    },
    # The public functions return whole tensors, collectively, and do not update weights.
    "DeepSpeedZeroOptimizer": {
        "round_robin_bit16_groups": "the parameters of each flat vector",
        "round_robin_bit16_offsets": "their places in it",
        "single_partition_of_fp32_groups": "this rank's masters",
        "averaged_gradients": "their gradients, without offload",
        "update_lp_params": "copies masters to weights",
    },
    "DeepSpeedZeroOptimizer_Stage3": {
        "fp16_groups": "the parameters of each subgroup",
        "fp32_partitioned_groups_flat": "this rank's masters",
        "averaged_gradients": "their gradients, without offload",
        "_get_norm_groups": "replaced, because the norm is known",
        "_partition_all_parameters": "releases weights that are out of date",
        "_reassign_or_swap_out_partitioned_parameters": "copies masters to weights",
    },
    "Parameter": {
        "ds_shape": "the whole shape of a partitioned parameter",
        "ds_numel": "its number of elements",
        "ds_tensor": "this rank's part",
        "partition_numel": "the length of a part, with padding",
    },
}
"""Why each private part of DeepSpeed is used, by the class or module that has it."""


def _require_private_parts(owner: object, name: str) -> None:
    """Raise RuntimeError if this version of DeepSpeed lacks a private part that is used here."""
    missing = [part for part in PRIVATE_PARTS.get(name, ["known parts"]) if not hasattr(owner, part)]
    if missing:
        reason = f"DeepSpeed {version('deepspeed')}: {name} has no {', '.join(missing)}"
        fix = "install the version of constraints.txt, or use {zero_stage} 0 or 1, which need no DeepSpeed"
        raise RuntimeError(str(Problem({}, reason, fix)))


def adopt_process_group() -> None:
    """Make DeepSpeed use the existing process group."""
    _require_private_parts(deepspeed.ops, "ops")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    # ZeRO-3 calls these functions by deprecated names; users cannot change that.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f".torch.distributed.{name}. is deprecated", FutureWarning)


def partition_parameters(module: nn.Module, data: CommGroup, dtype: torch.dtype) -> None:
    """Keep only this rank's part of each of a module's parameters."""
    deepspeed.zero.Init(module=module, data_parallel_group=data.process_group, mem_efficient_linear=False, dtype=dtype)


def _mpu(mesh: ProcessMesh) -> SimpleNamespace:
    """Return a mesh's groups as DeepSpeed's `mpu`, with `get_KIND_rank`, `get_KIND_world_size` and `get_KIND_group`."""
    groups = {"model": mesh.model, "tensor_model": mesh.tensor, "pipeline_model": mesh.pipeline, "data": mesh.data}
    functions = {}
    for kind, group in groups.items():
        for suffix, value in (("rank", group.rank), ("world_size", group.size), ("group", group.process_group)):
            functions[f"get_{kind}_parallel_{suffix}"] = lambda value=value: value
    return SimpleNamespace(**functions)


class DeepSpeedEngine(Engine):
    """Runs the passes of DeepSpeed's engine, which is `wrapped`."""

    optimizer: "_DeepSpeedOptimizer"

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        mesh: ProcessMesh,
        device: torch.device,
    ) -> None:
        """`config` is DeepSpeed's."""
        self.wrapped, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=_mpu(mesh), dist_init_required=False
        )
        stage = config["zero_optimization"]["stage"]
        is_offloaded = "offload_optimizer" in config["zero_optimization"]
        zero_class = _Zero3Optimizer if stage == 3 else _Zero2Optimizer
        zero_optimizer = zero_class(model, optimizer, self.wrapped, mesh.data.rank, is_offloaded)
        super().__init__(model, zero_optimizer, mesh, device)

    def follow_frozen(self) -> None:
        self.optimizer.freeze([parameter for parameter in self._model.parameters() if not parameter.requires_grad])

    def train(self, micro_batches: Sequence[ModelInputs], scales: LossScales) -> StepStats:
        with self.optimizer.thawed():
            return super().train(micro_batches, scales)

    def forward(
        self, inputs: StageInputs, *, scales: LossScales | None = None, **options: Any
    ) -> tuple[Tensor, PassStats]:
        if scales is None:
            return super().forward(inputs, **options)
        # DeepSpeed averages gradients over the data-parallel ranks.
        ranks = self._mesh.data.size
        scales = scales._replace(tokens=scales.tokens * ranks, mtp_targets=scales.mtp_targets * ranks)
        result, stats = self.wrapped(*inputs.tensors, context=inputs.context, scales=scales, with_stats=True, **options)
        return result, stats

    def backward(self, end: Tensor | GradientEdge, gradient: Tensor | None) -> None:
        assert isinstance(end, Tensor), "there are no pipeline stages"
        self.wrapped.backward(end * self._mesh.data.size, scale_wrt_gas=False)
        self.optimizer.count_pass()


class _DeepSpeedOptimizer(ZeroOptimizer):
    def __init__(
        self, model: nn.Module, base: torch.optim.Optimizer, wrapped: Any, rank: int, is_offloaded: bool
    ) -> None:
        """`wrapped` is DeepSpeed's engine, `rank` the data-parallel rank; `is_offloaded`: masters are on the host."""
        super().__init__(model, rank == 0)
        self.base = base
        self._wrapped, self._zero = wrapped, wrapped.optimizer
        _require_private_parts(self._zero, type(self._zero).__name__)
        self._rank, self._is_offloaded = rank, is_offloaded
        self._backward_passes_left = 0
        self._frozen: Collection[nn.Parameter] = ()
        self._frozen_sections: Collection[Sequence[Section]] = ()
        """Those of the frozen parameters, whose gradients are zero."""

    def freeze(self, frozen: Collection[nn.Parameter]) -> None:
        self._frozen = frozen
        self._frozen_sections = {self._sections[id(parameter)] for parameter in frozen}

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Require gradients of the frozen parameters inside the block, because DeepSpeed expects one of each."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    @contextmanager
    def reducing(self, micro_batches: int) -> Iterator[None]:
        self._backward_passes_left = micro_batches
        yield

    def count_pass(self) -> None:
        """Count a backward pass of the step."""
        self._backward_passes_left -= 1
        if self._backward_passes_left > 0:
            # Counts the micro-batch.
            self._wrapped.step()

    def step(self) -> None:
        with self.thawed(), self._copying_back():
            self._wrapped.step()
        self.steps += 1

    @contextmanager
    def _copying_back(self) -> Iterator[None]:
        """Copy back what an update inside the block changes of the frozen parameters, before weights are made of it.

        Masters of several parameters share a tensor, which the optimizer updates as a whole.
        """
        spans = [span for span in self.spans() if span.sections in self._frozen_sections]
        copies: list[list[tuple[Tensor, Tensor]]] = []

        def copy(*_: object) -> None:
            # ZeRO-3 updates one tensor after another.
            updated = {id(tensor) for group in self.base.param_groups for tensor in group["params"]}
            values = []
            for span in spans:
                if id(span.flat_master) in updated:
                    values += [span.master, *(self.moment(span, which) for which in span.moments)]
            copies.append([(value, value.clone()) for value in values])

        def copy_back(*_: object) -> None:
            for value, earlier in copies.pop():
                value.copy_(earlier)

        hooks = [self.base.register_step_pre_hook(copy), self.base.register_step_post_hook(copy_back)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def discard_gradients(self) -> None:
        for _, gradient in self.gradients():
            # DeepSpeed must not find an invalid gradient.
            gradient.zero_()
        # DeepSpeed clears its gradients in a step. An attribute of the instance overrides the method of the class.
        attributes = vars(self.base)
        attributes["step"] = lambda closure=None: None
        try:
            with self.thawed():
                self._wrapped.step()
        finally:
            del attributes["step"]

    def finish_step(self) -> None:
        pass

    def gradients(self) -> list[tuple[Span, Tensor]]:
        if self._is_offloaded:
            # DeepSpeed does not wait for its copies to page-locked host memory.
            get_accelerator().synchronize()
            gradients = super().gradients()
        else:
            gradients = list(zip(self.spans(), self._averaged_gradients(), strict=True))
        for span, gradient in gradients:
            if span.sections in self._frozen_sections:
                gradient.zero_()
        return gradients

    @abstractmethod
    def _averaged_gradients(self) -> Iterator[Tensor]:
        """Iterate over the gradients of `spans`, which are not those of the masters."""


class _Zero2Optimizer(_DeepSpeedOptimizer):
    """ZeRO 2, and ZeRO 1 and 2 with the optimizer offloaded (`DeepSpeedZeroOptimizer`)."""

    def spans(self) -> Iterator[Span]:
        masters = self._zero.single_partition_of_fp32_groups
        parameters = self._zero.round_robin_bit16_groups
        offsets = self._zero.round_robin_bit16_offsets
        vectors = zip(self.base.param_groups, parameters, offsets, masters, strict=True)
        for group, parts, starts, master in vectors:
            yield from self._spans_in(group, parts, starts, master, self._rank * master.numel(), True)

    def copy_masters_to_weights(self) -> None:
        self._zero.update_lp_params()

    def _averaged_gradients(self) -> Iterator[Tensor]:
        parts_at: dict[tuple[int, int], Tensor] = {}
        for index, master in enumerate(self._zero.single_partition_of_fp32_groups):
            parts: Sequence[Tensor] = self._zero.averaged_gradients[index]
            starts = accumulate((part.numel() for part in parts), initial=0)
            parts_at |= {(id(master), start): part for start, part in zip(starts, parts, strict=False)}
        for span in self.spans():
            gradient = parts_at.get((id(span.flat_master), span.offset))
            if gradient is None or gradient.numel() != span.length:
                raise RuntimeError(
                    f"DeepSpeed has no gradient of {span.sections[0].name} at element {span.offset} of the partition"
                )
            yield gradient


class _Zero3Optimizer(_DeepSpeedOptimizer):
    """ZeRO 3: each parameter is divided into equal parts, the last one padded; a rank's parts are concatenated."""

    def __init__(self, model: nn.Module, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        _require_private_parts(next(model.parameters()), "Parameter")
        # The norm is known, and DeepSpeed neither clips by it nor scales by it.
        self._zero._get_norm_groups = lambda: [torch.zeros(())]

    def _parts(self) -> Iterator[tuple[int, int, Span]]:
        """Iterate over subgroup, index within it, and this rank's span, leaving out parts that are only padding."""
        # They are the same for all tensors of an optimizer that does not need whole gradients.
        moments = self.base.param_groups[0][GROUP_MOMENTS]
        groups = zip(self._zero.fp16_groups, self._zero.fp32_partitioned_groups_flat, strict=True)
        for subgroup, (parameters, flat_master) in enumerate(groups):
            offset = 0
            for index, partitioned in enumerate(parameters):
                size = partitioned.partition_numel()
                start = self._rank * size
                length = min(size, partitioned.ds_numel - start)
                if length > 0:
                    weight = partitioned.ds_tensor.detach().view(-1).narrow(0, 0, length)
                    sections, shape = self._sections[id(partitioned)], partitioned.ds_shape
                    span = Span(sections, shape, start, weight, flat_master, offset, True, moments)
                    yield subgroup, index, span
                offset += size

    def spans(self) -> Iterator[Span]:
        for _, _, span in self._parts():
            yield span

    def _averaged_gradients(self) -> Iterator[Tensor]:
        for subgroup, index, span in self._parts():
            yield self._zero.averaged_gradients[subgroup][index].narrow(0, 0, span.length)

    def copy_masters_to_weights(self) -> None:
        # Releases gathered copies, which would be out of date; each parameter is gathered again before its next use.
        self._zero._partition_all_parameters()
        for subgroup in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(subgroup)
