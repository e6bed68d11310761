"""Counts the bytes of live tensors while code runs, on any device and without an allocator."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Storages that operators have returned and that are still alive.

    Attributes:
        live: their bytes now.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        given = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given)
        self.peak = max(self.peak, self.live)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._known or identity in given:
            return
        self._known.add(identity)
        self.live += size

        def release() -> None:
            self._known.discard(identity)
            self.live -= size

        weakref.finalize(storage, release)
