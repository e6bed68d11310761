"""The memory that a forward pass keeps for backward."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _NewStorages(TorchDispatchMode):
    """Records every storage that an operator creates, without keeping it alive."""

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
        return sum(size for reference, size in self._seen.values() if not reference.expired())


class ActivationMeter:
    """Measures a model's first forward pass with gradients on a CPU, by the tensors created."""

    def __init__(self, model: nn.Module) -> None:
        self.kept_bytes: int | None = None
        """Memory that the pass left occupied, including its output; None before it."""
        self._storages = _NewStorages()
        self._tracking, self._hooks = ExitStack(), ExitStack()
        self._hooks.callback(model.register_forward_pre_hook(self._begin, prepend=True).remove)
        self._hooks.callback(model.register_forward_hook(self._end).remove)

    def _begin(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._tracking.enter_context(self._storages)

    def _end(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._tracking.close()
            self.kept_bytes = self._storages.alive()
            self._hooks.close()
