"""The model's flags, its stored form, the grammar of --ladder-layers, and what sub-blocks can miss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_ladder.blueprint.model import ModelConfig, head_replicas, resolve_model, tensor_parallel_errors
from megatron_ladder.blueprint.model_flags import ModelFlags, parse_layers, parse_window
from megatron_ladder.blueprint.wiring import WIRINGS, ReadPlan, layers_text
from megatron_ladder.command_line import parse_command_line
from megatron_ladder.errors import UserError


def resolve(tensor_parallel: int = 2, **changes: object) -> tuple[Any, list[str]]:
    flags = replace(ModelFlags(), **changes)  # type: ignore[arg-type]
    try:
        return resolve_model(flags, 1000, 2048, tensor_parallel), []
    except UserError as error:
        return None, list(error.messages)


def refused(config: ModelConfig, tensor_parallel: int) -> list[str]:
    return list(map(str, tensor_parallel_errors(config, tensor_parallel)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", tuple(range(32))),
        ("none", ()),
        ("0", ()),
        ("16", tuple(range(16, 32))),
        ("[16]", (16,)),
        ("16-31", tuple(range(16, 32))),
        ("3,7,9-12", (3, 7, 9, 10, 11, 12)),
        ("[12, 3 , 3]", (3, 12)),
    ],
)
def test_layers_are_named(text: str, expected: tuple[int, ...]) -> None:
    assert parse_layers(text, 32) == expected


@pytest.mark.parametrize(("text", "found"), [("", "''"), ("33", "33"), ("5-3", "'5-3'"), ("a", "'a'"), ("²", "'²'")])
def test_layers_that_do_not_exist_are_refused(text: str, found: str) -> None:
    with pytest.raises(ValueError, match=rf"^{found} is not |^the upper {found} layers of 32 do not exist"):
        parse_layers(text, 32)


@pytest.mark.parametrize(
    ("text", "size"), [("128", 128), ("127,0", 128), ("(127, 0)", 128), ("[127,0]", 128), (f"{2**31 - 1}", 2**31 - 1)]
)
def test_windows_are_named(text: str, size: int) -> None:
    assert parse_window(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "-1,-1", "3,1", "1.5", "²", "", f"{2**31}", f"{2**31 - 1},0"])
def test_windows_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of positions|expected at most 2147483647 positions"):
        parse_window(text)


def test_wiring_flags() -> None:
    assert resolve(residual_mode="ladder")[0].ladder_layers == tuple(range(12))
    assert resolve(residual_mode="ladder", ladder_layers="4")[0].ladder_layers == (8, 9, 10, 11)
    assert resolve(residual_mode="parallel")[0].ladder_layers == ()
    two_late = resolve(residual_mode="ladder-parallel", ladder_layers="2", residual_staleness=2)[0]
    assert (two_late.ladder_layers, two_late.residual_staleness) == ((10, 11), 2)


def test_desync_flags() -> None:
    config, errors = resolve(tensor_parallel=4, residual_mode="desync")
    assert (config.desync_interval, config.desync_tp, errors) == (2, 4, [])
    assert resolve(residual_mode="desync", desync_interval=4)[0].desync_interval == 4
    ladder = resolve(residual_mode="ladder")[0]
    assert (ladder.desync_interval, ladder.desync_tp) == (0, None)


def test_lanes() -> None:
    config, errors = resolve(residual_mode="ladder", lanes=4, ladder_layers="[3]")
    assert (config.lanes, config.ladder_layers, errors) == (4, (3,), [])
    assert ModelConfig.from_dict(config.to_dict(), "file") == config
    assert [n for n in (1, 2, 3, 4, 6, 12) if not refused(config, n)] == [1, 2, 4]
    found = refused(config, 3)
    assert any("--lanes 4 is not a multiple of --tensor-model-parallel-size 3" in error for error in found)
    # One lane misses nothing, and without late layers nothing is in flight.
    standard = resolve()[0]
    assert resolve(residual_mode="ladder", lanes=1)[0] == standard
    assert resolve(residual_mode="ladder", lanes=4, residual_staleness=2, ladder_layers="none")[0] == standard


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"residual_mode": "ladder", "ladder_layers": "[7]", "residual_staleness": 2, "lanes": 2},
        {"residual_mode": "ladder", "ladder_layers": "none"},
        {"residual_mode": "ladder-parallel", "tie_embeddings": True, "rope_scaling": "llama3"},
        {"rope_scaling": "yarn", "rope_original_max_position_embeddings": 512, "rope_mscale": 0.7},
        {"residual_mode": "desync", "desync_interval": 4, "num_key_value_heads": 4, "norm_epsilon": 1e-6},
    ],
)
def test_the_flags_of_a_model_describe_it(changes: dict[str, object]) -> None:
    config, errors = resolve(**changes)  # type: ignore[arg-type]
    (flags,) = parse_command_line([ModelFlags], config.to_words(), "program", "")
    assert not errors and resolve_model(flags, 1000, 2048, 2) == config


def test_a_late_wiring_without_a_plain_one_remains_if_no_layer_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    one_lane, _ = resolve(residual_mode="ladder-parallel", residual_staleness=2)
    monkeypatch.delitem(WIRINGS, "parallel")
    plain = replace(one_lane, lanes=1).canonical()
    assert plain == replace(one_lane, ladder_layers=(), residual_staleness=1)


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        ("standard", {"hidden_size": 770}, "--hidden-size 770 is not divisible by --num-attention-heads 12"),
        ("standard", {"num_key_value_heads": 5}, "--num-attention-heads 12 is not divisible by --num-key-value-"),
        ("standard", {"head_dim": 63}, "--head-dim 63 is odd"),
        ("standard", {"rope_scaling_factor": 8.0}, "--rope-scaling-factor 8.0 requires --rope-scaling"),
        ("standard", {"rope_scaling": "llama3", "rope_high_freq_factor": 1.0}, "--rope-high-freq-factor 1.0 must be"),
        ("standard", {"rope_scaling": "yarn", "rope_beta_slow": 33.0}, "--rope-beta-fast 32.0 must not be below"),
        ("standard", {"rope_mscale": 0.5}, "--rope-mscale 0.5 requires --rope-scaling yarn"),
        (
            "standard",
            {"rope_scaling": "linear", "rope_original_max_position_embeddings": 512},
            "--rope-original-max-position-embeddings 512 requires --rope-scaling llama3 or yarn",
        ),
        ("standard", {"ladder_layers": "all"}, "--ladder-layers all has no meaning"),
        ("parallel", {"ladder_layers": "4"}, "--ladder-layers 4 has no meaning"),
        ("standard", {"residual_staleness": 2}, "--residual-staleness 2 has no meaning"),
        ("parallel", {"desync_interval": 4}, "--desync-interval 4 has no meaning"),
        ("ladder", {"residual_staleness": 0}, "--residual-staleness 0: expected 1 or more"),
        ("ladder", {"ladder_layers": "13"}, "--ladder-layers 13"),
        ("desync", {"ladder_layers": "4"}, "--ladder-layers 4 has no meaning with --residual-mode desync"),
        ("desync", {"residual_staleness": 2}, "--residual-staleness 2 has no meaning with --residual-mode desync"),
        ("desync", {"desync_interval": 3}, "--desync-interval 3 is not 2 or 4"),
        ("desync", {"tensor_parallel": 1}, "--tensor-model-parallel-size 1: there is nothing to desynchronise"),
        ("ladder", {"lanes": -1}, "--lanes -1: expected 0 or more"),
        ("ladder", {"lanes": 5}, "--num-attention-heads 12 is not divisible by --lanes 5"),
        ("ladder", {"lanes": 4, "num_key_value_heads": 6}, "--num-key-value-heads 6 and --lanes 4: one must"),
        ("ladder", {"lanes": 4, "ffn_hidden_size": 6}, "--ffn-hidden-size 6 is not divisible by --lanes 4"),
        ("parallel", {"lanes": 4}, "--lanes 4 has no meaning with --residual-mode parallel"),
        (
            "ladder",
            {"window_size": "9", "window_layers": "none"},
            "--window-size 9 with --window-layers none: expected",
        ),
    ],
)
def test_impossible_models_are_refused(mode: str, changes: dict[str, Any], message: str) -> None:
    found = resolve(residual_mode=mode, **changes)[1]
    assert any(message in error for error in found), found


def test_tensor_parallel_ranks_must_share_evenly() -> None:
    config, _ = resolve(num_key_value_heads=3, ffn_hidden_size=1000)
    assert [line.split(" ")[0] for line in refused(config, 3)] == ["--ffn-hidden-size"]
    assert refused(config, 1) == []
    found = " ".join(refused(config, 8))
    assert "--num-attention-heads 12" in found and "--num-key-value-heads 3" in found
    # Fewer key-value heads than ranks are replicated.
    assert refused(resolve(num_key_value_heads=2)[0], 4) == []
    assert [head_replicas(resolve(num_key_value_heads=2)[0], t) for t in (1, 2, 4, 8)] == [(), (), (2,), (4,)]
    delta = {"experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 4}
    assert [head_replicas(resolve(num_key_value_heads=2, **delta)[0], t) for t in (2, 4, 8)] == [(), (2,), (2, 4)]


DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 12,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 3},
            "--linear-num-value-heads 3 is not divisible by --linear-num-key-heads 2: every key head serves as many "
            "value heads",
        ),
        (
            {"linear_num_key_heads": 24},
            "--linear-num-value-heads 12 is not divisible by --linear-num-key-heads 24: every key head serves as many "
            "value heads",
        ),
        (
            {"residual_mode": "ladder", "lanes": 4, "num_key_value_heads": 4, "linear_num_value_heads": 6},
            "--linear-num-value-heads 6 is not divisible by --lanes 4",
        ),
    ],
)
def test_impossible_hybrids_are_refused(changes: dict[str, Any], message: str) -> None:
    assert resolve(**DELTA | changes)[1] == [message]


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (12, {"num_attention_heads": 24}, ""),
        (4, {"linear_num_value_heads": 6}, "--linear-num-value-heads 6 is not divisible by {}"),
        (
            4,
            {"linear_num_key_heads": 3},
            "--linear-num-key-heads 3 and {}: one must divide the other (heads are sharded or replicated)",
        ),
        (
            2,
            {"residual_mode": "ladder", "lanes": 4},
            "--linear-attention-layers 0 1 2 with --lanes 4 on {}: the lanes share these weights, so each needs a "
            "rank: use --tensor-model-parallel-size 4",
        ),
    ],
)
def test_ranks_that_cannot_share_a_hybrid_are_refused(ranks: int, changes: dict[str, Any], message: str) -> None:
    sizes = {"num_layers": 4, "num_key_value_heads": 12, "ffn_hidden_size": 960, "hidden_size": 768}
    config, errors = resolve(**DELTA | sizes | changes)
    assert not errors
    assert refused(config, ranks) == [message.format(f"--tensor-model-parallel-size {ranks}")] * bool(message)


LATENT: dict[str, Any] = {"kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}


def test_latent_attention() -> None:
    config, errors = resolve(**LATENT, num_key_value_heads=None, residual_mode="ladder", lanes=4)
    assert not errors
    assert (
        config.num_key_value_heads,
        config.head_dim,
        config.mixer_of(0).rotary_dim,
        config.mixer_of(0).value_dim,
    ) == (1, 20, 8, 16)
    assert ModelConfig.from_dict(config.to_dict(), "file") == config
    assert resolve_model(config.to_flags(), 1000, 2048, 1) == config
    # Lanes of a rank would share the latent.
    assert not refused(config, 4)
    (error,) = refused(config, 2)
    assert error.startswith("--kv-lora-rank 32 with --lanes 4 on --tensor-model-parallel-size 2: the lanes share")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "--num-key-value-heads 2: all heads share one latent"),
        ({"head_dim": 24}, "--head-dim 24: the sum of --qk-nope-head-dim and --qk-rope-head-dim"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5: --qk-rope-head-dim is the rotated part"),
        ({"qk_layernorm": True}, "--qk-layernorm True: the latents are normed"),
        ({"qk_rope_head_dim": 7}, "--qk-rope-head-dim 7 is odd"),
    ],
)
def test_latent_attention_rejects_flags_of_other_attention(changes: dict[str, Any], message: str) -> None:
    _, errors = resolve(**LATENT | {"num_key_value_heads": None} | changes)
    assert any(message in error for error in errors)


def test_the_stored_form_round_trips() -> None:
    config, _ = resolve(residual_mode="ladder", ladder_layers="3", qk_layernorm=True, rotary_base=5e5)
    stored = config.to_dict()
    assert stored["ladder_layers"] == [9, 10, 11]
    assert ModelConfig.from_dict(stored, "file") == config
    for plain, late in (("standard", "ladder"), ("standard", "ladder-attention"), ("parallel", "ladder-parallel")):
        # No layer that reads late is the plain wiring, by flags and in stored forms.
        same, _ = resolve(residual_mode=plain, qk_layernorm=True, rotary_base=5e5)
        assert resolve(
            residual_mode=late, ladder_layers="none", residual_staleness=2, qk_layernorm=True, rotary_base=5e5
        ) == (same, [])
        assert ModelConfig.from_dict(stored | {"residual_mode": late, "ladder_layers": []}, "file") == same


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"unknown": 1},
        {"ladder_layers": [99]},
        {"residual_mode": "x"},
        {"hidden_size": True},
        {"num_layers": "2"},
        {"rotary_base": True},
        {"residual_mode": ["ladder"]},
        {"rope_low_freq_factor": 0.0},
        {"ladder_layers": 3},
        {"ladder_layers": [1, 1]},
    ],
)
def test_a_damaged_stored_form_names_its_file(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="file"):
        ModelConfig.from_dict(resolve()[0].to_dict() | change, "file")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ([(), (), (2,)], "sub-block 2 misses output 2 before it"),
        ([(), (1,), (1,), (1, 3)], "sub-block 3 misses output 3 before it"),
        ([(), (0,)], "sub-block 1 misses output 0 before it"),
    ],
)
def test_an_output_that_was_seen_cannot_be_missing(missing: Sequence[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReadPlan.of(missing)


def test_a_description_of_layers_counts_all_of_them() -> None:
    for layers, text in (
        ((1,), "layer 1 (of 4)"),
        ((2, 3), "layers 2-3 (of 4)"),
        ((0, 2, 3), "layers 0,2-3 (of 4)"),
        ((0, 1, 2, 3), "all layers"),
        ((), "no layer"),
    ):
        assert layers_text(layers, 4) == text
