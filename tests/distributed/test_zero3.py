"""ZeRO-3: every weight is gathered when it is used, and no rank holds more of the model than it needs."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ladder.blueprint.model import head_replicas
from megatron_ladder.engine.build import build_rank_model
from megatron_ladder.parallel.layout import SHARDED_MARKS, parameter_sections
from tests.helpers.patience import wait_until
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, mesh_of
from tests.helpers.steps import LATENT, RECIPE, steps_of_batches
from tests.helpers.training import CPU, build_trainer_here, deepspeed_is_started, own_batches, run_of, weight_pieces

NOTHING_STAYS = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
}
"""Every weight, however small, is gathered for each use and released afterwards."""

BOOKKEEPING = ("aten::detach", "aten::view")
"""Operators that DeepSpeed and autograd call on parameters without reading elements."""


class Use(NamedTuple):
    """One use of a weight by an operator."""

    name: str
    backward: bool
    whole: bool
    gathered: int
    """Number of matrices that were gathered at that time."""


class Uses(TorchDispatchMode):
    """Observes every operator in forward, backward and recomputation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parameters: list[Any] = list(model.parameters())
        self._matrices = [p for p in parameters if math.prod(p.ds_shape) > p.ds_shape[-1]]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._storages: list[tuple[str, StorageWeakRef]] = []
        self.seen: list[Use] = []
        self.backward = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            name = self._names.get(id(value)) if isinstance(value, Tensor) else None
            if name is None or (operator.name() in BOOKKEEPING and (self.backward or value.numel() == 0)):
                continue
            gathered = sum(matrix.numel() > 0 for matrix in self._matrices)
            self.seen.append(Use(name, self.backward, tuple(value.shape) == value.ds_shape, gathered))
            self._storages.append((name, StorageWeakRef(value.untyped_storage())))
        return operator(*args, **(kwargs or {}))

    def still_held(self) -> set[str]:
        """Return the weights, except norms, of which a gathered copy is still in memory.

        After a wait for a collective, gloo's thread still holds its tensors until it is scheduled again.
        """
        storages = [(name, storage) for name, storage in self._storages if "norm" not in name]
        wait_until(lambda: all(storage.expired() for _, storage in storages), 1.0)
        return {name for name, storage in storages if not storage.expired()}


class Observed(NamedTuple):
    """Observations of one step."""

    uses: list[Use]
    held_after_forward: set[str]
    held_after_backward: set[str]
    reductions: Counter[str]
    """How often each parameter's gradient was reduced."""
    names: set[str]


def observe(argv: list[str]) -> Observed:
    """On each rank: observe one micro-batch of the second step, when DeepSpeed has recorded the order of modules."""
    trainer = build_trainer_here(argv)
    engine = trainer.engine.wrapped
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    reductions: Counter[str] = Counter()
    take_away: Callable[[nn.Parameter], None] = engine.optimizer.reduce_ready_partitions_and_remove_grads

    def counted(parameter: nn.Parameter) -> None:
        reductions[names[id(parameter)]] += 1
        take_away(parameter)

    engine.optimizer.reduce_ready_partitions_and_remove_grads = counted
    for batches in steps_of_batches(2, 2):
        reductions.clear()
        (batch,) = own_batches(trainer, batches)
        with Uses(trainer.model) as uses:
            loss = engine(*batch)
            after_forward = uses.still_held()
            uses.backward = True
            engine.backward(loss)
        after_backward = uses.still_held()
        engine.step()
    return Observed(uses.seen, after_forward, after_backward, reductions, set(names.values()))


@pytest.mark.parametrize(
    ("tensor_parallel", "words"),
    [
        (1, "--residual-mode ladder --tie-embeddings --qk-layernorm --add-attention-output-bias --add-mlp-bias"),
        (2, "--residual-mode standard --sequence-parallel --recompute-granularity full"),
        (2, "--residual-mode standard --no-tp-overlap --recompute-granularity full --tie-embeddings --qk-layernorm"),
        (2, "--residual-mode desync --desync-interval 2 --recompute-granularity full"),
        (1, "--residual-mode ladder-parallel --recompute-granularity full --recompute-num-layers 1"),
        (2, "--residual-mode ladder --lanes 2 --recompute-granularity full --recompute-num-layers 1 --qk-layernorm"),
        # Both ranks hold the latents, as they would hold a key head.
        (2, f"{LATENT} --residual-mode ladder --q-lora-rank 12 --attention-output-gate --add-qkv-bias"),
    ],
)
def test_every_weight_is_gathered_before_its_use(
    gloo_pools: GlooPools, tmp_path: Path, tensor_parallel: int, words: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(NOTHING_STAYS))
    argv = [*RECIPE, *words.split(), "--tensor-model-parallel-size", str(tensor_parallel), "--zero-stage", "3"]
    argv += ["--deepspeed_config", str(tmp_path / "ds.json")]
    for uses, after_forward, after_backward, reductions, names in gloo_pools(2 * tensor_parallel).run(observe, argv):
        assert [use for use in uses if not use.whole] == []
        assert {use.name for use in uses if not use.backward} == names
        # Backward does not read biases, and reads the norms of heads and of desync through a view.
        matrices = {name for name in names if name.endswith("proj.weight")}
        assert {use.name for use in uses if use.backward} >= matrices
        # There are 13 or 14 matrices: two per sub-block, and the vocabulary's if embedding and head share it.
        assert max(use.gathered for use in uses) <= 3
        assert after_forward | after_backward == set()
        assert reductions == Counter(names)


def parts_and_weights(argv: list[str]) -> tuple[list[tuple[int, int, int]], list[tuple[bool, ...]], Pieces]:
    """On each rank: return for each parameter of a model without an engine the number of elements in memory, in this
    rank's part and in total; its marks; and the weights of a trainer."""
    assert deepspeed_is_started()
    run = run_of(argv, torch.distributed.get_world_size())
    tensor_parallel = run.parallel.tensor_model_parallel_size
    model = build_rank_model(run, mesh_of(tensor_parallel, head_replicas(run.model, tensor_parallel)), CPU)
    parameters: list[Any] = list(model.parameters())
    if run.parallel.zero_stage == "3":
        sizes = [(p.numel(), p.ds_tensor.numel(), p.ds_numel) for p in parameters]
    else:
        sizes = [(p.numel(), p.numel(), p.numel()) for p in parameters]
    marks = [tuple(getattr(p, mark) for mark in SHARDED_MARKS) for p, _ in parameter_sections(model)]
    return sizes, marks, weight_pieces(build_trainer_here(argv))


def test_a_model_is_partitioned_while_it_is_built(gloo_pools: GlooPools) -> None:
    """Its initial weights equal those of every other layout bitwise."""
    argv = [*RECIPE, "--bf16", "--tensor-model-parallel-size", "2", "--residual-mode", "ladder", "--qk-layernorm"]
    plain = gloo_pools(4).run(parts_and_weights, argv)
    partitioned = gloo_pools(4).run(parts_and_weights, [*argv, "--zero-stage", "3"])
    for (whole, marks, weights), (sizes, marks_kept, gathered) in zip(plain, partitioned, strict=True):
        assert [(here, part) for here, part, _ in sizes] == [(0, -(-size // 2)) for size, _, _ in whole]
        assert [total for _, _, total in sizes] == [size for size, _, _ in whole]
        assert marks == marks_kept and set(itertools.chain(*marks)) == {True, False}
        for (name, _, values), (_, _, values_gathered) in zip(weights, gathered, strict=True):
            assert torch.equal(values, values_gathered), name
