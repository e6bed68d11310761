"""The floating-point operations of a model, and how many of them GPUs can execute in a second."""

import itertools
from dataclasses import dataclass
from functools import cached_property

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import head_tensor, layer_tensors, mtp_tensors


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one sequence, summed over its tokens and all tensor-parallel ranks.

    A multiply-add is two operations. Only matrix products count; norms, rotary embedding, softmax and activations are
    left out, as is usual. These are the FLOPs of the mathematics: forward once, backward twice as much (a product's
    gradient is two products), attention over the full [s, s] score matrix, as in PaLM (arXiv 2204.02311, appendix B)
    and Megatron-LM (arXiv 2104.04473, appendix), although half of it is masked, and with a window of W positions over
    [s, W]. Recomputation and the wiring change none of these.
    """

    model: ModelConfig
    sequence_length: int
    mtp_depths: int = 1
    """How often a drafting head is applied."""

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Forward, of each layer; the last one can be a drafting head's.

        A kernel that skips masked scores computes (s + 1) / (2 s) of those counted here.
        """
        s = self.sequence_length
        flops: list[int] = []
        for layer in layer_tensors(self.model.mtp_config):
            branches = [*itertools.chain.from_iterable(sub_block.branches for sub_block in layer)]
            of_matrices = sum(2 * s * branch.weights_per_token() for branch in branches)
            flops.append(of_matrices + sum(int(branch.mixer.flops(s, s)) for branch in branches if branch.mixer))
        return tuple(flops)

    @property
    def head(self) -> int:
        """Forward, of the output head at every position: 2 s h V."""
        return 2 * self.sequence_length * head_tensor(self.model).numel

    @property
    def forward(self) -> int:
        """Model FLOPs of a forward pass, with those of a drafting head."""
        mtp = mtp_tensors(self.model)
        layers = self.layers[: self.model.num_layers]
        of_mtp = 0 if mtp is None else self.layers[-1] + self.head + 2 * self.sequence_length * mtp.eh_proj.numel
        return sum(layers) + self.head + self.mtp_depths * of_mtp

    @property
    def training(self) -> int:
        """Model FLOPs of a training step's share of one sequence: forward and backward."""
        return 3 * self.forward


PEAK_TFLOPS = {
    "h100": 989.0,
    "h100-pcie": 756.0,
    "h100-nvl": 835.0,
    "gh200": 989.0,
    "h200": 989.0,
    "h20": 148.0,
    "b200": 2250.0,
    "gb200": 2500.0,
    "a100": 312.0,
    "l40s": 362.0,
    "a6000": 154.8,
    "rtx-6000-ada": 364.0,
    "rtx-pro-6000": 503.8,
    "rtx-3090": 71.0,
    "rtx-4090": 165.2,
    "rtx-5090": 209.5,
    "gb10": 125.0,
}
"""Dense bf16 TFLOP/s with sums in fp32, from NVIDIA's data sheets; gb10: an eighth of its sparse FP4 rate (assumed)."""


def peak_flops(device: str) -> float | None:
    """Return the bf16 FLOP/s of a GPU that CUDA names so; None if it is unknown."""
    # The name of one may begin with that of another, as H200 with H20.
    names = sorted((name for name in PEAK_TFLOPS if name in device.lower().replace(" ", "-")), key=len)
    return PEAK_TFLOPS[names[-1]] * 1e12 if names else None
