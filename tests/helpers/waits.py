"""Counts how often the host waits for the device in a training step.

A CPU plays the device. Tensors that were created without naming a device, and what follows from them alone, are the
host's; reading any other tensor, or sending one of the host's, is a wait, unless it is sent from pinned memory with
`non_blocking`.
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from megatron_ladder.data.samples import SampleRows
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.step import train_step
from tests.helpers.races import READERS
from tests.helpers.training import build_trainer_here

DEVICE = torch.device("cpu", 0)


class Waits(TorchDispatchMode):
    """Lists the places where the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._of_host = WeakIdKeyDictionary()
        self._pinned = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        on_host = all(leaf in self._of_host for leaf in inputs) if inputs else kwargs.get("device") != DEVICE
        selects = name == "index" and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in inputs[1:])
        sends = name == "copy_" and not on_host and args[1] in self._of_host and not self._is_pinned(args[1], *args[2:])
        if sends or (not on_host and (name in READERS or selects)):
            self._note()
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (on_host or name == "lift_fresh"):
                self._of_host[leaf] = True
            elif isinstance(leaf, Tensor):
                # Written in place.
                self._of_host.pop(leaf, None)
        return result

    def _is_pinned(self, tensor: Tensor, non_blocking: bool = False) -> bool:
        return tensor in self._pinned and non_blocking

    def _note(self) -> None:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_stack()[:-2]]
        # On CUDA, AdamW is one kernel, which does not need its step count on the host.
        if not any("/torch/optim/" in name for name, _ in frames):
            self.places.append(" < ".join(f"{name}:{line}" for name, line in frames[::-1] if "/torch/" not in name))

    @contextmanager
    def counting(self, optimizer: Any) -> Iterator[None]:
        """Count inside the block; `optimizer` is DeepSpeed's."""
        from deepspeed.accelerator import get_accelerator

        def reading(method: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if tensor not in self._of_host:
                    self._note()
                with torch.utils._python_dispatch._disable_current_modes():
                    return method(tensor, *args, **kwargs)

            return read

        def send(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = kwargs.get("device", args[0] if args else None)
            sent = to(tensor, *args, **kwargs)
            if target == DEVICE and tensor in self._of_host:
                if not self._is_pinned(tensor, kwargs.get("non_blocking", False)):
                    self._note()
                self._of_host.pop(sent, None)
            return sent

        def pin(tensor: Tensor) -> Tensor:
            pinned = tensor.clone()
            self._pinned[pinned] = True
            return pinned

        def create(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("device") == DEVICE:
                self._note()
            return tensor(*args, **kwargs)

        to, tensor = Tensor.to, torch.tensor
        with ExitStack() as patches:
            for name in ("tolist", "cpu", "numpy"):
                patches.enter_context(mock.patch.object(Tensor, name, reading(getattr(Tensor, name))))
            patches.enter_context(mock.patch.object(Tensor, "to", send))
            patches.enter_context(mock.patch.object(Tensor, "pin_memory", pin))
            patches.enter_context(mock.patch.object(torch, "tensor", create))
            accelerator = type(get_accelerator())
            patches.enter_context(mock.patch.object(accelerator, "synchronize", lambda *_: self._note()))
            # DeepSpeed waits for streams and events, if there are any.
            patches.enter_context(mock.patch.object(accelerator, "resolves_data_dependency", lambda _: False))
            stream = mock.Mock(synchronize=self._note)
            patches.enter_context(mock.patch.object(accelerator, "current_stream", lambda *_: stream))
            if hasattr(optimizer, "reduce_and_partition_stream"):
                optimizer.reduce_and_partition_stream = stream
            patches.enter_context(self)
            yield


class MaskedNumbers:
    """Samples of which some labels do not count."""

    name = "numbers"

    def samples(self, numbers: NDArray[np.int64]) -> SampleRows:
        tokens = (numbers[:, None] * 7 + np.arange(13)) % 101
        return SampleRows(tokens, (tokens % 3 > 0).astype(np.uint8))


def waits_of_steps(argv: list[str]) -> list[list[str]]:
    """On each rank: return the waits of three steps."""
    trainer = replace(build_trainer_here(argv), device=DEVICE, eod_id=7)
    trainer.engine._device = DEVICE
    batches: Any = sample_batches(trainer, MaskedNumbers(), 0)  # type: ignore[arg-type]
    places: deque[list[str]] = deque()
    for iteration in range(1, 4):
        waits = Waits()
        wrapped = getattr(trainer.engine, "wrapped", None)
        with waits.counting(None if wrapped is None else wrapped.optimizer):
            train_step(trainer, next(batches), iteration, lambda: (1.0, 2.0))
        places.append(waits.places)
    batches.close()
    return list(places)
