"""What a resumed run must say as the checkpoint does."""

from pathlib import Path

import pytest

from megatron_ladder.comm.launch import Place
from megatron_ladder.errors import UserError
from megatron_ladder.train.inputs import read_inputs
from tests.unit.generate.tiny_model import reference_of, tiny_config, write_checkpoint

SIZES = (
    "--num-layers 3 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-key-value-heads 2 "
    "--seq-length 12 --vocab-size 67 --train-iters 5 --lr 1e-3"
).split()


def mistakes_about(save: Path, words: str) -> list[str]:
    with pytest.raises(UserError) as raised:
        read_inputs([*SIZES, "--load", str(save), *words.split()], Place(0, 4, 0))
    return [mistake.split(":")[0] for mistake in raised.value.mistakes if "was trained with" in mistake]


def test_a_desync_model_resumes_at_its_own_size(tmp_path: Path) -> None:
    config = tiny_config(residual_mode="desync", desync_interval=4, desync_tp=2)
    write_checkpoint(tmp_path, config, reference_of(config)[0])
    desync = "--residual-mode desync --desync-interval"
    assert mistakes_about(tmp_path, f"{desync} 4 --tensor-model-parallel-size 2") == []
    assert mistakes_about(tmp_path, f"{desync} 4 --tensor-model-parallel-size 4") == ["--tensor-model-parallel-size 4"]
    assert mistakes_about(tmp_path, f"{desync} 2 --tensor-model-parallel-size 2") == ["--desync-interval 2"]
    assert mistakes_about(tmp_path, "--tensor-model-parallel-size 2") == ["--residual-mode standard"]
