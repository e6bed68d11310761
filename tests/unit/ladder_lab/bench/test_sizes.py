"""Shapes by name and in numbers."""

from ladder_lab.bench.sizes import SIZES, find_size
from megatron_ladder.blueprint.tensors import parameter_count


def test_a_shape_is_given_by_name_or_in_numbers() -> None:
    assert find_size("small-train") is SIZES["small-train"]
    assert find_size("70b") is SIZES["llama-70b"] and find_size("13b") is SIZES["llama-2-13b"]
    shape = find_size("2x24x40x6x3x100")
    assert (shape.num_layers, shape.head_dim, shape.vocab_size, shape.tie_embeddings) == (2, 4, 100, False)
    # A layer: q and o 24 x 24, k and v 24 x 12, three matrices 24 x 40, two norms; then embedding, head, last norm.
    layer = 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40 + 2 * 24
    assert parameter_count(shape).total == 2 * layer + 2 * 100 * 24 + 24
