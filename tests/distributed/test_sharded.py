"""The optimizer of ZeRO 1: when it communicates, and that modules wait for their weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.parallel.layout import parameter_sections
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces
from tests.helpers.steps import RECIPE, Batch, History, check_same, steps_of_batches, take_steps
from tests.helpers.training import build_trainer_here, own_batches, weight_pieces

ARGV = [*RECIPE, *"--zero-stage 1 --global-batch-size 8 --residual-mode ladder".split()]


class _LateWork:
    """Communicates only when somebody waits."""

    def __init__(self, start: Callable[[], Work | None]) -> None:
        self._start = start

    def wait(self) -> None:
        work = self._start()
        assert work is not None
        work.wait()


class LateGroup(CommGroup):
    """A group on which a result that nobody waits for never arrives."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self.events: list[str] = []

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        assert into is not None
        self.events.append("reduce")
        return into, _LateWork(lambda: super(LateGroup, self).start_reduce_scatter(tensor, into)[1])

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        assert into is not None
        self.events.append("gather")
        return into, _LateWork(lambda: super(LateGroup, self).start_all_gather(tensor, into)[1])


def steps(argv: list[str], batches: list[list[Batch]], late: bool) -> tuple[History, Pieces]:
    """On each rank: what happens in every step, and the final weights."""
    trainer = build_trainer_here(argv, wrap_data=LateGroup if late else lambda group: group)
    return take_steps(trainer, batches), weight_pieces(trainer)


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("--qk-layernorm --add-attention-output-bias --add-mlp-bias", 2),
        ("--tie-embeddings --bf16 --recompute-granularity full", 2),
        ("--residual-mode desync --desync-interval 2 --tensor-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 2 --tie-embeddings --bf16", 4),
        ("--num-experts 4 --expert-model-parallel-size 2 --add-moe-bias --bf16", 4),
    ],
)
def test_every_module_waits_for_its_weights(gloo_pools: GlooPools, tmp_path: Path, words: str, world: int) -> None:
    config = tmp_path / "one_parameter_per_bucket.json"
    config.write_text('{"zero_optimization": {"reduce_bucket_size": 1}}')
    argv, batches = [*ARGV, *words.split(), "--deepspeed_config", str(config)], steps_of_batches(3, 4)
    check_same(*(gloo_pools(world).run(steps, argv, batches, late) for late in (True, False)))


def order_of_events(words: str, batches: list[list[Batch]]) -> list[str]:
    """On each rank: the starts of collectives in a step of two micro-batches, and the ends of their backward."""
    groups: list[LateGroup] = []
    argv = [*ARGV, *words.split()]
    trainer = build_trainer_here(argv, wrap_data=lambda group: groups.append(LateGroup(group)) or groups[0])
    events = groups[0].events
    backward: Any = trainer.engine.backward

    def noted_backward(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        events.append("end of backward")

    trainer.engine.backward = noted_backward
    # Backward computes the gradient of the embedding last, and that of the lowest norm just before.
    trainer.model.embedding.weight.register_post_accumulate_grad_hook(lambda _: events.append("embedding"))
    for parameter, sections in parameter_sections(trainer.model):
        if any(section.name == "layers.0.attention_norm.weight" for section in sections):
            parameter.register_post_accumulate_grad_hook(lambda _: events.append("norm"))
    train_step(trainer, own_batches(trainer, batches[0]), 1)
    return events


@pytest.mark.parametrize(
    ("world", "words", "late"),
    [(2, "", 2), (4, "--tensor-model-parallel-size 2 --num-experts 4 --moe-ffn-hidden-size 48", 3)],
    ids=["dense", "experts"],
)
def test_gradients_are_reduced_under_the_last_backward(
    gloo_pools: GlooPools, world: int, words: str, late: int
) -> None:
    for events in gloo_pools(world).run(order_of_events, words, steps_of_batches(1, 4)):
        buckets = events.count("reduce")
        assert buckets > 8 and events.count("gather") == buckets
        # All but the buckets of the lowest matrix, the embedding, the norms and the routers are reduced before the
        # gradients of these.
        last = events.index("norm", events.index("norm") + 1)
        assert events[:3] == ["norm", "embedding", "end of backward"] and set(events[3:last]) == {"reduce"}
        assert buckets - events[:last].count("reduce") <= late
        assert events[last:][-buckets - 1 :] == ["end of backward", *["gather"] * buckets]


def unusual_steps(batches: list[list[Batch]]) -> None:
    """On each rank: a step in which one parameter has a gradient, and a step with one backward pass too many."""
    trainer = build_trainer_here(ARGV)
    train_step(trainer, own_batches(trainer, batches[0]), 1)
    weight = trainer.model.embedding.weight
    optimizer = trainer.engine.optimizer
    with optimizer.reducing(1):
        weight.sum().backward()
    for span, gradient in trainer.engine.optimizer.gradients():
        is_embedding = span.sections[0].name == "embedding.weight"
        assert gradient.eq(2.0 if is_embedding else 0.0).all()
    with optimizer.reducing(1):
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="gradient 2 of a parameter in a step of 1 backward passes"):
            weight.sum().backward()


def test_steps_with_too_few_or_too_many_gradients(gloo_pools: GlooPools) -> None:
    gloo_pools(2).run(unusual_steps, steps_of_batches(1, 4))
