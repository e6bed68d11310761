"""The interface between a training step and DeepSpeed, of which `engine/pipeline.py` is the form with stages."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.comm.group import to_device
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.engine.state import EngineState, engine_state
from megatron_ladder.model.language_model import LanguageModel, LossScales

ModelInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""One micro-batch: token ids and labels [b, s]; loss mask, positions, lengths and document bounds or None, as
`LanguageModel.forward` takes them."""


def batch_to_device(batch: ModelInputs, device: torch.device) -> list[Any]:
    """Move all tensors except the document bounds, which the model needs on the CPU."""
    *others, document_bounds = batch
    return [*(None if one is None else to_device(one, device) for one in others), document_bounds]


def deepspeed_mpu(mesh: ProcessMesh) -> SimpleNamespace:
    """Return a mesh's groups as DeepSpeed's `mpu`, with `get_KIND_rank`, `get_KIND_world_size` and `get_KIND_group`."""
    groups = {"model": mesh.model, "tensor_model": mesh.tensor, "pipeline_model": mesh.pipeline, "data": mesh.data}
    functions = {}
    for kind, group in groups.items():
        for suffix, value in (("rank", group.rank), ("world_size", group.size), ("group", group.process_group)):
            functions[f"get_{kind}_parallel_{suffix}"] = lambda value=value: value
    return SimpleNamespace(**functions)


class Engine:
    """A DeepSpeed engine around this rank's model, which has all layers. All ranks call its methods alike.

    A training step calls `forward_backward`, may change the gradients in `state.gradients()`, and ends with
    `step` or `skip_step`.

    Attributes:
        passes: the captured forward and backward passes; None for none.
    """

    passes: CapturedPasses | None = None

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer | ShardedOptimizer,
        config: dict[str, Any],
        mesh: ProcessMesh,
        device: torch.device,
    ) -> None:
        """`config` is DeepSpeed's."""
        self._model = model
        self._mesh = mesh
        self._device = device
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        # DeepSpeed accepts a function that returns any optimizer.
        given = optimizer if self._sharded is None else lambda _: optimizer
        self.wrapped = self._initialize(model, optimizer=given, config=config, dist_init_required=False)
        """DeepSpeed's engine."""
        if self._sharded is not None:
            self.wrapped.enable_backward_allreduce = False
        self.state: EngineState = engine_state(self.wrapped)

    def _initialize(self, model: LanguageModel, **arguments: Any) -> Any:
        """Return DeepSpeed's engine around the model; `arguments` are for `deepspeed.initialize`."""
        import deepspeed

        return deepspeed.initialize(model=model, mpu=deepspeed_mpu(self._mesh), **arguments)[0]

    @property
    def _gradient_divisor(self) -> int:
        """The number by which DeepSpeed divides gradients: it averages them over data-parallel ranks."""
        return self._mesh.data.size if self._sharded is None else 1

    def _reducing(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context of this many forward and backward passes."""
        return nullcontext() if self._sharded is None else self._sharded.reducing(micro_batches)

    def forward_backward(self, micro_batches: Sequence[ModelInputs], scales: LossScales) -> Tensor:
        """Run forward and backward of this rank's micro-batches, and reduce gradients over data-parallel ranks.

        The gradients are those of the scaled losses, summed over all tokens of all data-parallel ranks.
        Returns this rank's scaled loss, summed over micro-batches; zero on pipeline stages other than the last.
        """
        captured = None if self.passes is None else self.passes.run(micro_batches, scales)
        if captured is not None:
            # DeepSpeed counts micro-batches.
            for _ in micro_batches[1:]:
                self.wrapped.step()
            return captured
        loss_sum = torch.zeros((), device=self._device)
        with self._reducing(len(micro_batches)):
            for index, batch in enumerate(micro_batches):
                body_loss_scale = scales.tokens * self._gradient_divisor
                loss = self.wrapped(*batch_to_device(batch, self._device), body_loss_scale=body_loss_scale)
                loss = loss * scales.targets.to(loss.dtype)
                loss_sum += loss.detach()
                self.wrapped.backward(loss * self._gradient_divisor, scale_wrt_gas=False)
                if index < len(micro_batches) - 1:
                    self.wrapped.step()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[ModelInputs]) -> Tensor:
        """Return the loss summed over all target tokens; zero on pipeline stages other than the last."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in micro_batches:
            loss_sum += self.wrapped.module(*batch_to_device(batch, self._device))
        return loss_sum

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[ModelInputs]) -> Tensor:
        """Return `LanguageModel.predictions` of each micro-batch, [n, 2, s, b]; zeros on stages other than the last."""
        batches = [batch_to_device(batch, self._device) for batch in micro_batches]
        return torch.stack([self.wrapped.module(*batch, predicts=True) for batch in batches])

    @contextmanager
    def keeping_frozen(self) -> Iterator[None]:
        """Train inside the block, but leave the parameters that need no gradient as they are.

        Backward computes their gradients all the same: buckets, DeepSpeed and captured passes expect one of each.
        """
        frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        kept, tied = set(frozen), self._model.tied_weight
        if tied is not None:
            # The copies of the two stages remain equal if only one of them is frozen.
            votes = self._mesh.ends.all_reduce(torch.tensor(float(tied in kept), device=self._device))
            kept.update([tied] if votes else [])
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with self.state.keeping(kept) if kept else nullcontext():
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def step(self) -> None:
        """Update the weights with the reduced gradients, and clear the gradients.

        Other ranks' parts of the weights may arrive later, at the latest under the next forward pass.
        """
        self.wrapped.step()

    def close(self) -> None:
        """Free what was captured, while its process groups exist."""
        if self.passes is not None:
            self.passes.close()

    def gather_in_steps(self) -> None:
        """Gather the weights in `step`, also with captured passes, for a caller that reads them after every step."""
        if self.passes is not None:
            self.passes.gathers = False

    def finish_step(self) -> None:
        """Wait for the weights of the last step, for readers other than the model's forward pass."""
        if self._sharded is not None:
            self._sharded.finish_gather()

    def skip_step(self) -> None:
        """Clear the gradients without changing weights, moments or the optimizer's step count."""
        for _, gradient in self.state.gradients():
            # DeepSpeed must not find an invalid gradient either.
            gradient.zero_()
        # An attribute of the instance overrides the method of the class.
        optimizer = vars(self._sharded or self.state.base)
        optimizer["step"] = lambda closure=None: None
        try:
            self.step()
        finally:
            del optimizer["step"]
