"""How much memory a forward pass leaves occupied for its backward."""

from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ladder.comm.group import CommGroup


class _NewStorages(TorchDispatchMode):
    """Knows every storage that an operator made, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self._seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """Bytes of the storages that still exist."""
        return sum(size for reference, size in self._seen.values() if not reference.expired())


class ActivationMeter:
    """Measures the first forward pass of a model that is made for a backward pass; costs nothing after it.

    On CUDA the allocator is asked; elsewhere the tensors that are made are followed.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.kept_bytes: int | None = None
        """What the pass left occupied, its output included; None before it."""
        self._device = device
        self._before = 0
        self._storages: _NewStorages | None = None
        self._stance: AbstractContextManager[object] | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def largest(self, world: CommGroup) -> int:
        """The most of any rank, in bytes; all ranks take part."""
        kept = torch.tensor(float(self.kept_bytes or 0), dtype=torch.float64, device=self._device)
        return int(world.all_reduce(kept, torch.distributed.ReduceOp.MAX))

    def _begin(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            # Compiled functions cannot be followed.
            self._stance = torch.compiler.set_stance("force_eager")
            self._storages = _NewStorages()
            self._storages.__enter__()

    def _end(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._storages is None:
            self.kept_bytes = torch.cuda.memory_allocated(self._device) - self._before
        else:
            self._storages.__exit__(None, None, None)
            assert self._stance is not None
            self._stance.__exit__(None, None, None)
            self.kept_bytes = self._storages.alive()
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._storages = None
