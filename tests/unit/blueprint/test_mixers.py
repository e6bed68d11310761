"""What token mixers declare, compared with pairs counted one by one and with allocated tensors."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ladder_lab.cost.inference import InferenceRequest, inference_memory, predict_inference
from ladder_lab.cost.machines import Machine
from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.mixers.mixer import StateKind, StateSpec
from megatron_ladder.blueprint.model import state_bytes
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.model.mixers.mixer import States
from tests.helpers.sharded import LATENT_WIDTHS, small_model
from tests.unit.generate.tiny_model import MODELS, WINDOWS, tiny_config

POSITIONS = (1, 3, 4, 5, 17)


@pytest.mark.parametrize(
    ("kind", "window", "entries"),
    [
        (StateKind.GROWS, 0, {1: 1, 3: 3, 4: 4, 5: 5, 17: 17}),
        (StateKind.WINDOW, 4, {1: 1, 3: 3, 4: 4, 5: 4, 17: 4}),
        (StateKind.FIXED, 0, dict.fromkeys(POSITIONS, 1)),
    ],
)
def test_states_have_as_many_bytes_as_their_tensors(kind: StateKind, window: int, entries: dict[int, int]) -> None:
    for positions in POSITIONS:
        for shape, is_fp32 in (((3, 8), False), ((2, 5, 7), True)):
            spec = StateSpec("x", shape, kind, window, is_fp32)
            state = torch.empty(spec.shape_for(positions), dtype=torch.float32 if is_fp32 else torch.bfloat16)
            assert state.numel() == math.prod(shape) * entries[positions]
            assert spec.bytes(positions, 2) == state.nbytes
            # An fp32 state of an fp64 model is not narrower than its other states.
            assert spec.bytes(positions, 8) == 8 * state.numel()
    assert spec.shape_for(4) == ((2, 5, 7) if kind is StateKind.FIXED else (2, 4, 5, 7))


LANES = {"residual_mode": "ladder", "ladder_layers": (0, 1), "lanes": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, WINDOWS, LATENT_WIDTHS, WINDOWS | LANES])
def test_declared_bytes_are_those_that_generation_allocates(changes: dict[str, Any], ranks: int) -> None:
    config = small_model(**changes)
    states = States.allocate(config, ranks, 1, 20, torch.bfloat16, torch.device("meta"))
    allocated = sum(state.nbytes for of_mixer in states.tensors for state in of_mixer.values())
    numbers = 16 if config.kv_lora_rank else 2 * 8 * max(1, config.num_key_value_heads // ranks)
    entries = sum(4 if layer in config.window_layers else 20 for layer in range(4))
    assert state_bytes(config, ranks, 20, 2) == allocated == 2 * numbers * entries
    request = InferenceRequest(config, Machine.usual("h100"), ranks, batch=3, prompt=15, new_tokens=5)
    assert inference_memory(request).cache == 3 * allocated


def visible_pairs(length: int, window: int) -> int:
    return sum(not window or query - window < key for query in range(length) for key in range(query + 1))


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 40])
@pytest.mark.parametrize("length", [1, 4, 30])
def test_flops_of_windows_are_those_of_visible_pairs(window: int, length: int) -> None:
    """A pair is two products as wide as a head for each of four heads. Of a query's own position half is counted."""
    config = small_model(window_size=window, window_layers=(0,) if window else ())
    mixer = config.mixer_of(0)
    of_pair = 2 * 4 * 2 * 8
    widest = min(window or length, length)
    seen = mixer.causal_positions(length)
    assert seen * length == pytest.approx(visible_pairs(length, window) - widest / 2)
    assert mixer.flops(length, seen) == pytest.approx(of_pair * (visible_pairs(length, window) - widest / 2))
    newest = visible_pairs(length, window) - visible_pairs(length - 1, window)
    assert mixer.decode_flops(length) == of_pair * newest
    assert ModelFlops(config, length).layers[0] - ModelFlops(config, length).layers[1] == (
        of_pair * length * (widest - length)
    )


@pytest.mark.parametrize("length", [1, 30])
def test_flops_of_gated_delta_are_those_of_its_products_token_by_token(length: int) -> None:
    config = small_model(**MODELS["delta"])
    mixer = config.mixer_of(0)
    state, key, value = torch.zeros(4, 6, 5), torch.ones(4, 6, 1), torch.ones(4, 5, 1)
    with FlopCounterMode(display=False) as counter:
        for _ in range(length):
            added = value - state.mT @ key
            state = state + key @ added.mT
            state.mT @ key
    assert mixer.flops(length, length) == counter.get_total_flops()
    assert mixer.decode_flops(100_000) * length == counter.get_total_flops()
    # Projections of two key heads, of four value heads, their gates and two numbers each, and the output.
    matrices = config.hidden_size * (2 * 2 * 6 + 4 * (5 + 5 + 2) + 4 * 5)
    mlp = 3 * config.hidden_size * config.ffn_hidden_size
    assert ModelFlops(config, length).layers[0] == 2 * length * (matrices + mlp) + mixer.flops(length, length)


def test_planned_steps_stop_to_grow_at_the_window() -> None:
    machine = Machine.usual("h100")

    def step(prompt: int, **changes: Any) -> float:
        config = small_model(num_layers=32, head_dim=128, max_position_embeddings=1 << 20, **changes)
        return predict_inference(InferenceRequest(config, machine, 1, 8, prompt, 2)).decode

    windows = {"window_size": 1024, "window_layers": tuple(range(32))}
    assert step(2048, **windows) == step(65_536, **windows) == pytest.approx(step(1023), rel=1e-3)
    assert step(65_536) > step(2048) > step(2048, **windows)
    some = windows | {"window_layers": tuple(layer for layer in range(32) if layer % 4)}
    growth = step(65_536) - step(2048)
    assert step(65_536, **some) - step(2048, **some) == pytest.approx(growth / 4)


def test_windows_in_three_of_four_layers_keep_about_a_quarter() -> None:
    config = small_model(window_size=1024, window_layers=(0, 1, 2), max_position_embeddings=32_768)
    share = state_bytes(config, 1, 32_768, 2) / state_bytes(small_model(), 1, 32_768, 2)
    assert share == (1 + 3 * 1024 / 32_768) / 4


@pytest.mark.parametrize("name", MODELS)
def test_no_tensor_of_one_dimension_decays(name: str) -> None:
    """As in Megatron, whose optimizer exempts biases and all other parameters of one dimension."""
    specs = [*model_tensors(tiny_config(**MODELS[name]))]
    assert [spec.name for spec in specs if len(spec.shape) == 1 and spec.role.decays] == []
