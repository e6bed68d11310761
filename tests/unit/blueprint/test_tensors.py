"""Counts against transformers' models, torch's FLOP counter, and published sizes; stages against all partitions."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from megatron_ladder.blueprint.flops import ModelFlops, peak_flops
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import _branch, balanced_partition, parameter_count
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.engine.build import partition
from tests.helpers.hugging_face import Family, transformers_model
from tests.helpers.sharded import small_model

SMALL = small_model(num_layers=3, hidden_size=24, ffn_hidden_size=40, head_dim=10, vocab_size=37)


@pytest.mark.parametrize(
    ("family", "model"),
    [
        (LlamaForCausalLM, SMALL),
        (LlamaForCausalLM, replace(SMALL, tie_embeddings=True)),
        (LlamaForCausalLM, replace(SMALL, add_mlp_bias=True)),
        (LlamaForCausalLM, replace(SMALL, add_qkv_bias=True, add_attention_output_bias=True)),
        (Qwen2ForCausalLM, replace(SMALL, head_dim=6, add_qkv_bias=True)),
        (Qwen3ForCausalLM, replace(SMALL, qk_layernorm=True)),
    ],
)
def test_parameters_are_those_of_transformers(family: Family, model: ModelConfig) -> None:
    with torch.device("meta"):
        other = transformers_model(model, family=family)
    count = parameter_count(model)
    assert count.total == sum(parameter.numel() for parameter in other.parameters())
    layers = tuple(sum(parameter.numel() for parameter in layer.parameters()) for layer in other.model.layers)
    assert count.layers == layers


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "ffn", "published", "published_untied"),
    [
        (40, 1536, 24, 4096, 1.208, 1.284),
        (40, 2304, 36, 9216, 3.511, 3.624),
        (52, 1536, 24, 4096, 1.548, 1.623),
        (52, 2304, 36, 9216, 4.530, 4.643),
    ],
)
def test_published_sizes(
    layers: int, hidden: int, heads: int, ffn: int, published: float, published_untied: float
) -> None:
    model = small_model(num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, head_dim=hidden // heads)
    # StarCoder's vocabulary.
    model = replace(model, num_attention_heads=heads, num_key_value_heads=heads, vocab_size=49152)
    count = parameter_count(model)
    assert round((count.total - count.lm_head) / 1e9, 3) == published
    assert round(count.total / 1e9, 3) == published_untied
    tied = parameter_count(replace(model, tie_embeddings=True))
    assert tied.lm_head == 0 and tied.total == count.total - count.lm_head


def counted(model: PreTrainedModel, tokens: torch.Tensor, backward: bool) -> int:
    """Operations of one sequence."""
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(tokens).logits.float().square().sum()
        if backward:
            loss.backward()
    assert not any("rotary" in module for module in counter.get_flop_counts())
    return int(counter.get_total_flops()) // len(tokens)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 17])
def test_operations_are_those_that_torch_counts(heads: tuple[int, int], length: int) -> None:
    model = replace(SMALL, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    other, flops = transformers_model(model), ModelFlops(model, length)
    tokens = torch.arange(2 * length).view(2, length) % model.vocab_size
    assert flops.forward == counted(other, tokens, backward=False)
    assert flops.training == counted(other, tokens, backward=True)


def test_windows_limit_the_operations_of_attention() -> None:
    windowed = replace(SMALL, window_size=5, window_layers=(0,))
    for length, hidden in ((3, 0), (5, 0), (17, 12)):
        first, *others = ModelFlops(windowed, length).layers
        whole, *same = ModelFlops(SMALL, length).layers
        assert whole - first == 4 * length * hidden * SMALL.num_attention_heads * SMALL.head_dim and others == same
    # Kernels skip what no query sees.
    mixer = replace(windowed, window_size=512).mixer_of(0)
    seen = [min(position, 512) for position in range(1, 4097)]
    assert mixer.causal_positions(4096) == pytest.approx(sum(seen) / 4096, rel=2e-3)
    assert mixer.causal_positions(256) == 128


def sizes(ranges: list[range]) -> list[int]:
    assert [r.start for r in ranges] == [0, *(r.stop for r in ranges[:-1])]
    return [len(r) for r in ranges]


def test_the_heaviest_stage_is_as_light_as_in_any_partition() -> None:
    weights, before, after = [3, 1, 4, 1, 5, 9, 2, 6], 7, 8
    for stages in range(1, 9):
        found = balanced_partition(weights, before, after, stages)
        assert len(found) == stages and min(sizes(found)) >= 1 and found[-1].stop == 8

        def heaviest(bounds: tuple[int, ...]) -> int:
            totals = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
            totals[0] += before
            totals[-1] += after
            return max(totals)

        every = ((0, *cut, 8) for cut in itertools.combinations(range(1, 8), stages - 1))
        assert heaviest((0, *(r.stop for r in found))) == min(map(heaviest, every))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [4, 4]),
        # A layer has 4 x 64^2 + 3 x 64 x 172 parameters and norms, about 49 thousand; 2000 words are 128 thousand.
        ("--pipeline-partition parameters", [4, 4]),
        # The final norm is on the last stage.
        ("--pipeline-partition parameters --num-layers 7", [4, 3]),
        ("--pipeline-partition parameters --pipeline-model-parallel-size 4", [1, 3, 3, 1]),
        # The last stage holds a copy of a tied matrix.
        ("--pipeline-partition parameters --pipeline-model-parallel-size 4 --tie-embeddings", [1, 3, 3, 1]),
    ],
)
def test_a_runs_partition(words: str, expected: list[int]) -> None:
    base = (
        "--train-iters 9 --lr 1e-3 --seq-length 128 --hidden-size 64 --ffn-hidden-size 172 --num-attention-heads 4 "
        "--num-layers 8 --pipeline-model-parallel-size 2 "
    )
    run = resolve_run(parse_run((base + words).split()), 2000, 4)
    assert sizes(partition(run)) == expected


def test_a_branch_without_tensors_of_its_own_is_not_taken_for_an_mlp() -> None:
    with pytest.raises(KeyError, match="convolution"):
        _branch(small_model(), 0, "convolution")


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("Quadro RTX 6000", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_follows_from_its_name(device: str, teraflops: float | None) -> None:
    assert peak_flops(device) == (None if teraflops is None else teraflops * 1e12)
