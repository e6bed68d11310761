"""What crosses the cut between two pipeline stages: the state, which is one tensor and one or several messages.

    slots       stream | missing outputs, as unreduced partial sums | missing outputs that are complete
    messages    0 --------------------------------------------------| 1 ------| 2 ------| ...

Missing outputs are ordered from the oldest to the newest, in partial sums of as many slots as the stream has shards.
Outputs of divided experts come complete from other ranks. So each has a separate message, for which the stream does not
wait, and for which the next stage waits where it is first seen. Farskip, a stage of one layer, and the next one:

    stage 0    [ A ][ S ][ R ]    . combine
    messages                  ~~ 0 ~~ ~~ 1 ~~
    stage 1                           [ A        ] . 1  [ S ][ R ]

Gradients travel in the opposite direction and order: that of a complete output as soon as the stage behind the cut has
it, and message 0 after the rest of its backward pass. In the stage before the cut, the gradient of the combine starts,
and R goes backward, before that of the stream arrives:

    stage 1    [ R' ][ S' ]    [ A' ]
    messages              ~~ 1 ~~    ~~ 0 ~~
    stage 0                      . combine' [ R' ] . 0  [ S' ][ A' ]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from megatron_ladder.blueprint.wiring import ReadPlan
from megatron_ladder.comm.group import Work


def slots_of_messages(outputs: Sequence[int], plan: ReadPlan, of_partial: int) -> list[int]:
    """Return the number of slots of each message of a state that lacks these outputs, whose partial sums have
    `of_partial` slots."""
    complete = [1 for output in outputs if output in plan.complete]
    return [1 + (len(outputs) - len(complete)) * of_partial, *complete]


def output_slots(state: Tensor, outputs: Sequence[int], plan: ReadPlan) -> Sequence[Tensor]:
    """Return the slots of each missing output in a state, or of its gradient in that of a state, [slots, s, b, h]."""
    complete = [output for output in outputs if output in plan.complete]
    partial = [output for output in outputs if output not in plan.complete]
    of_partial = (len(state) - 1 - len(complete)) // max(1, len(partial))
    slots = state[1:].split([*(of_partial for _ in partial), *(1 for _ in complete)]) if outputs else ()
    by_output = dict(zip([*partial, *complete], slots, strict=True))
    return [by_output[output] for output in outputs]


def send_at_the_end(message: Tensor) -> None:
    """Leave a message to the end of the pass, which returns it."""


class StateMessages:
    """The messages of the pass that runs.

    Attributes:
        send: starts to send the next message of what leaves; the pass returns all of them in any case.
    """

    def __init__(self) -> None:
        self._arriving: Sequence[Work] = ()
        self.send: Callable[[Tensor], None] = send_at_the_end

    @contextmanager
    def of_pass(self, arriving: Sequence[Work], send: Callable[[Tensor], None]) -> Iterator[None]:
        """Run a pass, which receives messages that are `arriving`, from message 0 on."""
        self._arriving, self.send = arriving, send
        try:
            yield
        finally:
            self._arriving, self.send = (), send_at_the_end

    @property
    def stream(self) -> Work | None:
        """The handle of message 0; None if it has arrived."""
        return self._arriving[0] if self._arriving else None

    def of_outputs(self, outputs: Sequence[int], plan: ReadPlan) -> list[Work | None]:
        """Return the handle of the message that contains each missing output."""
        complete = [output for output in outputs if output in plan.complete]
        handles = dict(zip(complete, self._arriving[1:], strict=False))
        return [handles.get(output, self.stream) for output in outputs]
