"""A run under ZeRO-3 on two ranks, from its start to a save and from its resume to another: operations on files."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ladder.config.run import read_run
from megatron_ladder.data.indexed import Sidecar, write_sidecar
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_ladder.train import loop, setup
from tests.helpers.commands import free_port
from tests.helpers.operations import Operations
from tests.helpers.pool import GlooPools
from tests.helpers.tokenizer_copies import write_words
from tests.helpers.tokens import write_tokens
from tests.helpers.training import CPU

RECIPE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 12 --zero-stage 3 "
    "--bf16 --train-iters 4 --lr 1e-2 --micro-batch-size 2 --save-interval 2 "
    "--tokenizer-type HuggingFaceTokenizer"
).split()


def write_data(folder: Path) -> list[str]:
    """Write a data set with a sidecar, and return flags."""
    tokenizer, prefix = folder / "tokenizer.json", write_tokens(folder / "tokens", documents=10)
    write_words(tokenizer, "</s>", *map(str, range(100)), unknown="0")
    found = HuggingFaceTokenizer(tokenizer)
    sidecar = Sidecar(found.kind, found.sha256, found.vocab_size, 0, False, largest_id=100, documents=10, tokens=500)
    write_sidecar(prefix, sidecar)
    flags = f"--tokenizer-model {tokenizer} --data-path {prefix} --split 8,2,0 --eval-iters 1"
    return [*RECIPE, *flags.split()]


def pretrain(argv: list[str], folder: Path, port: int) -> list[str]:
    """On each rank: run the program in the pool's process group; return the operations on files in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        # The first rank of a host does more than the others.
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(setup, "start_process_group", lambda *of_the_run: CPU)
        patch.setattr(loop, "stop_process_group", dist.barrier)
        patch.setattr(loop, "Watch", mock.MagicMock())
        operations = Operations(folder, patch)
        loop.pretrain(read_run(argv))
        return [line for lines in operations.of_thread.values() for line in lines]


def test_ranks_open_what_they_read_and_resume_bitwise(gloo_pools: GlooPools, tmp_path: Path) -> None:
    """On a thousand ranks each operation is a thousand operations of one shared file system."""
    words, pool = write_data(tmp_path), gloo_pools(2)
    whole, half, rest = (
        [*words, *f"--save {tmp_path}/{name} --load {tmp_path}/{name} {flags}".split()]
        for name, flags in (("a", "--async-save"), ("b", "--exit-interval 2"), ("b", ""))
    )
    counts = []
    for argv in (whole, half, rest):
        first, other = pool.run(pretrain, argv, tmp_path, free_port())
        looks = [line for line in other if not line.startswith("open ")]
        # Once a host, that --save can be written to; whether the tokenizer has a file of another format; whether --save
        # is that of rank 0; and the end of a background save.
        expected = ["stat", "stat", "stat", "stat"] + ["replace"] * ("--async-save" in argv)
        assert [line.split()[0] for line in looks] == expected, looks
        assert len(first) > 60
        counts.append(len(other))
    # The start, two saves of which one is in the background; the start and a save; the start, a load and a save.
    assert all(count <= most for count, most in zip(counts, (21, 16, 20), strict=True)), counts
    for path in sorted((tmp_path / "a" / "iter_0000004").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "b" / "iter_0000004" / path.name).read_bytes(), path
