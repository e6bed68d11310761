"""The counts of the host's work per layer, compared with closed forms."""

import re

import pytest
import torch.distributed as dist

from tools.host_time import main


@pytest.mark.parametrize(
    ("case", "wiring", "most", "expected"),
    [("decode", "ladder", 17, 2), ("decode", "ladder-parallel", 17, 1), ("train", "ladder", 48, 4)],
)
def test_a_layer_launches_few_kernels_and_the_reduces_of_its_wiring(
    case: str, wiring: str, most: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding: norms and additions 4, products 4, rotation 4, cache 2, attention 1, SwiGLU 2."""
    try:
        main(f"--case {case} --wiring {wiring} --rounds 1".split())
    finally:
        dist.destroy_process_group()
    found = re.search(r"^\| one layer \| (\d+) \| \d+ \| (\d+) \|", capsys.readouterr().out, re.MULTILINE)
    assert found and int(found[1]) <= most and int(found[2]) == expected
