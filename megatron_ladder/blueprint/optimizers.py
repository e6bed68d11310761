"""Optimizers as data: what each keeps of a tensor, and which layouts it needs. `engine/optimizer.py` builds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_ladder.blueprint.specs import Role
from megatron_ladder.errors import Problem, UserError, expected_one_of

_TWO_MOMENTS = dict.fromkeys(set(Role) - {Role.STATE}, ("exp_avg", "exp_avg_sq"))


@dataclass(frozen=True)
class OptimizerKind:
    """One `--optimizer`."""

    name: str
    description: str
    """Its part of the flag's help."""
    moments: Mapping[Role, tuple[str, ...]]
    """By role, the names of the moments of a tensor: in fp32, each of the shape of the tensor. A name is the key in the
    state of torch's optimizer, and the kind in checkpoints."""
    aliases: tuple[str, ...] = ()
    """Other names that the flag accepts."""
    needs_whole_gradients: bool = False
    """Whether ranks exchange their parts of a matrix, which needs all of its gradient on their devices."""
    has_apex: bool = False
    """Whether NVIDIA's apex implements it."""

    def moments_of(self, role: Role) -> tuple[str, ...]:
        """Return the names of the moments of a tensor with a role."""
        return self.moments.get(role, ())


OPTIMIZERS = (
    OptimizerKind("adamw", "AdamW, which Megatron calls adam.", _TWO_MOMENTS, aliases=("adam",), has_apex=True),
    OptimizerKind(
        "muon",
        "moves each matrix of the layers by its orthogonalised momentum, and everything else by AdamW.",
        _TWO_MOMENTS | {Role.MATRIX: ("exp_avg",)},
        needs_whole_gradients=True,
    ),
)
MOMENTS = tuple(dict.fromkeys(which for kind in OPTIMIZERS for moments in kind.moments.values() for which in moments))
"""The names of the moments of all optimizers."""
if TYPE_CHECKING:
    OptimizerName = str
    FlagOptimizer = str
else:
    # The command line reads the choices from the types.
    OptimizerName = Literal[tuple(kind.name for kind in OPTIMIZERS)]
    FlagOptimizer = Literal[tuple(name for kind in OPTIMIZERS for name in (kind.name, *kind.aliases))]


def optimizer_kind(name: str) -> OptimizerKind:
    """Return the optimizer with a name or an alias; raise UserError if there is none."""
    for kind in OPTIMIZERS:
        if name in (kind.name, *kind.aliases):
            return kind
    expected = expected_one_of(name, [kind.name for kind in OPTIMIZERS])
    raise UserError(Problem({"optimizer": name}, "{}: {expected}", expected=expected))
