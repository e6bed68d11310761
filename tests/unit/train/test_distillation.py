"""The teacher of --distill-from: what is refused, what is read, and where it stays out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import parse_run
from megatron_ladder.model.language_model import Distillation, LanguageModel
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.stats import PassStats
from megatron_ladder.tokenizers.copies import tokenizer_files
from megatron_ladder.tokenizers.kinds import NullTokenizer
from megatron_ladder.train.distillation import build_distillation
from megatron_ladder.train.inputs import RunInputs, read_inputs
from tests.helpers.runs import errors_of
from tests.helpers.sharded import fill_slices
from tests.helpers.tokens import write_documents
from tests.unit.generate.tiny_model import reference_of, tiny_config, tiny_model, write_checkpoint

SIZES = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 12 --vocab-size 67 --train-iters 5 --lr 1e-3 "
    "--eval-iters 0 --split 1"
).split()


def read(folder: Path, teacher: Path, more: str = "", processes: int = 1) -> RunInputs:
    """Read a command line that distils from a directory."""
    data = write_documents(folder / "tokens", range(60), range(60))
    argv = [*SIZES, "--data-path", data, "--distill-from", teacher, *more.split()]
    return read_inputs(parse_run([str(word) for word in argv]), RankInfo(0, processes, 0))


def write_teacher(save: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a checkpoint, and return its weights."""
    config = tiny_config(**changes)
    weights, _ = reference_of(config)
    write_checkpoint(save, config, weights)
    return weights


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_checkpoint_teaches_in_the_precision_of_the_run(tmp_path: Path, precision: str) -> None:
    weights = write_teacher(tmp_path / "teacher", residual_mode="ladder", ladder_layers=(1,))
    inputs = read(tmp_path, tmp_path / "teacher", precision)
    assert inputs.teacher is not None
    found = build_distillation(inputs.run, inputs.teacher, ProcessMesh.single(), torch.device("cpu"))
    assert (found.weight, found.temperature) == (0.9, 1.0)
    dtype = torch.bfloat16 if precision else torch.float32
    assert {(one.dtype, one.requires_grad) for one in found.teacher.parameters()} == {(dtype, False)}
    down = found.teacher.get_parameter("stack.layers.2.bodies.mlp.down_proj.weight")
    assert torch.equal(down, weights["layers.2.mlp.down_proj.weight"].to(dtype))


def test_a_teacher_with_other_words_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "teacher", tiny_config(vocab_size=257))
    for name, content in tokenizer_files(NullTokenizer(256)).items():
        (folder / name).write_bytes(content)
    named = f"--distill-from {folder}: the teacher has another tokenizer, whose id 0 is '0' instead of '\\x00': "
    words = "--vocab-size 257 --tokenizer-type"
    assert errors_of(read, tmp_path, folder, f"{words} ByteTokenizer") == [
        f"{named}train both models with one tokenizer"
    ]
    assert read(tmp_path, folder, f"{words[17:]} NullTokenizer --vocab-size 256").teacher is not None
    assert read(tmp_path, folder, f"{words} ByteTokenizer --distill-weight 0").teacher is None


def test_teachers_that_cannot_teach_are_refused(tmp_path: Path) -> None:
    write_teacher(tmp_path / "other", vocab_size=70, max_position_embeddings=8)
    named = f"--distill-from {tmp_path}/other/iter_0000010: the teacher has "
    assert errors_of(read, tmp_path, tmp_path / "other") == [
        f"{named}a vocabulary of 70 ids, and the model one of 67: both must use one tokenizer; if they do, give "
        "--vocab-size 70",
        f"{named}8 positions: use a --seq-length of at most 8, not 12",
    ]
    write_teacher(tmp_path / "heads", num_attention_heads=3, num_key_value_heads=3)
    (error,) = errors_of(read, tmp_path, tmp_path / "heads", "--tensor-model-parallel-size 2", processes=2)
    assert "the teacher cannot be sharded like the model: --num-attention-heads 3 is not divisible by" in error
    write_teacher(tmp_path / "desync", residual_mode="desync", desync_interval=2, desync_tp=2)
    (error,) = errors_of(read, tmp_path, tmp_path / "desync")
    assert "this desync model has per-rank norms for 2 tensor-parallel ranks: use 2" in error
    assert read(tmp_path, tmp_path / "desync", "--tensor-model-parallel-size 2", processes=2).teacher is not None
    (error,) = errors_of(read, tmp_path, tmp_path / "heads", f"--save {tmp_path}/heads --overwrite-checkpoints")
    assert error.startswith(f"--distill-from {tmp_path}/heads/iter_0000010: is in --save {tmp_path}/heads, where ")


def student_and_teacher(weight: float) -> tuple[LanguageModel, LanguageModel]:
    """Return models of one rank in fp64, the first of which learns from the second."""
    teacher = tiny_model(tiny_config(), reference_of(tiny_config(), 3)[0], dtype=torch.float64).requires_grad_(False)
    config, mesh = tiny_config(residual_mode="ladder", ladder_layers=(1, 2), hidden_size=16), ProcessMesh.single()
    distillation = Distillation(teacher, weight, 2.0)
    student = LanguageModel(config, mesh, StackOptions(), dtype=torch.float64, distillation=distillation)
    fill_slices(student, reference_of(config, 4)[0])
    return student, teacher


def test_documents_of_a_row_are_distilled_separately() -> None:
    student, _ = student_and_teacher(weight=1.0)
    ids = torch.arange(20).view(1, 20) % 11
    sums = PassStats()
    for begin, end in ((0, 3), (3, 8), (8, 9)):
        sums = sums.plus(student.stage(ids[:, begin:end], ids[:, begin + 1 : end + 1])[1])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
    bounds = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    _, stats = student.stage(ids[:, :9], ids[:, 1:10], positions=positions, document_bounds=bounds)
    assert [*stats.losses] == ["distillation loss"]
    torch.testing.assert_close(stats.losses, sums.losses, rtol=1e-12, atol=0)


def gradients(model: LanguageModel) -> Iterator[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


def test_the_teacher_is_no_part_of_the_student() -> None:
    student, teacher = student_and_teacher(weight=0.0)
    before = [parameter.clone() for parameter in teacher.parameters()]
    alone = LanguageModel(student.config, ProcessMesh.single(), dtype=torch.float64)
    assert alone.state_dict().keys() == student.state_dict().keys()
    assert alone.load_state_dict(student.state_dict()).missing_keys == []
    ids = torch.arange(20).view(2, 10)
    found = []
    for model in (alone, student):
        loss, stats = model.stage(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append(stats.losses)
    # At weight 0, the teacher is only reported.
    assert all(map(torch.equal, gradients(alone), gradients(student)))
    assert student.extra_losses == ("distillation loss",) and found[1]["distillation loss"] > 0.1
    assert alone.extra_losses == () and not found[0]
    assert all(map(torch.equal, teacher.parameters(), before))
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_an_evaluation_does_not_run_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = student_and_teacher(weight=0.5)
    monkeypatch.setattr(teacher.stack, "forward", lambda *_: pytest.fail("the teacher ran"))
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        loss, stats = student.stage(ids[:, :-1], ids[:, 1:])
        predicted = student(ids[:, :-1], ids[:, 1:], predicts=True)
    torch.testing.assert_close(predicted[0].sum(), loss)
    assert not stats.losses
