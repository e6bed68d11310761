"""The branch of a checkpoint: which other checkpoints in its directory precede it.

    "lineage": {"branch": "9f2c41d0a7b35e68", "forks": [["41d07ab35e689f2c", 1000]],
                "parent": {"directory": "/runs/a/iter_0001000", "iteration": 1000, "manifest_checksum": "xxh3_128:..."}}

A run that resumes the current checkpoint of its --save directory continues the branch of that checkpoint. Every other
run begins a branch with a random name: from scratch, with --finetune, or from another directory or an earlier
checkpoint. `forks` lists the branches of the same directory that it came from, each with the last iteration in common.
`parent` is the checkpoint that the run loaded, or null; it is for information only.

Manifests of earlier versions have no lineage. Their checkpoints belong to one branch, whose name is empty.
"""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple


class Lineage(NamedTuple):
    """The branch of a checkpoint, the branches that it came from with the last iteration in common, and its parent."""

    branch: str = ""
    forks: tuple[tuple[str, int], ...] = ()
    parent: Mapping[str, Any] | None = None

    @staticmethod
    def begin(parent: Mapping[str, Any] | None = None) -> "Lineage":
        """Return a new branch that has no iteration in common with another."""
        return Lineage(secrets.token_hex(8), (), parent)

    def fork(self, iteration: int) -> "Lineage":
        """Return a new branch that leaves this one after an iteration."""
        return Lineage(secrets.token_hex(8), (*self.forks, (self.branch, iteration)))

    def includes(self, other: "Lineage", iteration: int) -> bool:
        """Return whether checkpoints of this branch may fall back to one of `other` at that iteration."""
        return other.branch == self.branch or iteration <= dict(self.forks).get(other.branch, -1)

    def record(self) -> dict[str, Any]:
        """Return the value in a manifest."""
        return {"branch": self.branch, "forks": [list(fork) for fork in self.forks], "parent": self.parent}

    @staticmethod
    def from_record(record: Any) -> "Lineage":
        """Parse the value in a manifest; raise ValueError if it is not a lineage."""
        match record:
            case {"branch": str(branch), "forks": list(forks), "parent": (dict() | None) as parent}:
                if all(isinstance(fork, list) and [type(item) for item in fork] == [str, int] for fork in forks):
                    return Lineage(branch, tuple((name, iteration) for name, iteration in forks), parent)
        raise ValueError("lineage does not have a branch, a list of forks with their iterations, and a parent")
