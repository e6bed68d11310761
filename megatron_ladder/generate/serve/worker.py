"""What every rank does with the plans: its share of the model's work."""

from collections.abc import Callable, Sequence

from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.plans import Plan, PlanChannel
from megatron_ladder.generate.slots import SlotBatch


def carry_out_plans(
    batch: SlotBatch,
    channel: PlanChannel,
    next_plan: Callable[[], Plan] | None = None,
    tell: Callable[[Sequence[NewToken]], None] | None = None,
) -> None:
    """Steps until a plan says stop; every rank must call it.

    Args:
        next_plan: what rank 0 gets its plans from; it may wait. None on the others.
        tell: takes the tokens of each step, before slots whose samples are finished are free again; on rank 0.

    Raises:
        BadNumbersError: the model's logits are not finite; on every rank.
    """

    def note(tokens: Sequence[NewToken]) -> None:
        if tell is not None:
            tell(tokens)
        for token in tokens:
            if token.finish_reason is not None:
                batch.release(token.sample)

    while True:
        plan = channel.share(None if next_plan is None else next_plan())
        if plan.stop:
            return
        for slot in plan.gone:
            batch.release(slot)
        if plan.admit:
            note(batch.admit(plan.admit))
        if batch.is_busy():
            note(batch.step())
