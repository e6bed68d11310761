"""Scores and continuations of an evaluation in one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from megatron_ladder.errors import UserError
from megatron_ladder.generate.evaluation import Evaluator
from megatron_ladder.parallel.scoring import Score
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_ladder.tokenizers.kinds import ByteTokenizer
from tests.reference import ReferenceConfig, Weights, greedy_continuation, reference_logits
from tests.unit.generate.tiny_model import PROMPTS, reference_of, tiny_config, write_checkpoint

CONFIG = tiny_config(residual_mode="ladder", ladder_layers=(1, 2), vocab_size=257, max_position_embeddings=12)
TEXTS = [
    ((5, 9, 3), (17,)),
    ((17,), (60, 2, 200)),
    (tuple(range(1, 40)), (7, 8)),
    ((4,), ()),
    ((1,), tuple(range(12))),
]
"""Contexts and continuations; the third context is longer than the positions."""


def reference_score(
    weights: Weights, reference: ReferenceConfig, context: tuple[int, ...], text: tuple[int, ...], positions: int
) -> tuple[float, bool]:
    """Return the log-likelihood of a text after its context, and whether each of its ids is the most likely one."""
    ids = torch.tensor([*context, *text])[-positions - 1 :]
    logprobs = reference_logits(weights, reference, ids[None, :-1])[0].log_softmax(-1)[len(ids) - 1 - len(text) :]
    targets = ids[len(ids) - len(text) :]
    return logprobs.gather(1, targets[:, None]).sum().item(), logprobs.argmax(-1).tolist() == targets.tolist()


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIG)
    yield Evaluator(2, model=folder, tokenizer_type="ByteTokenizer")


def test_scores_are_those_of_the_reference(evaluator: Evaluator) -> None:
    """In batches of two, sorted by length; every text gets the score that it has alone."""
    weights, reference = reference_of(CONFIG)
    greedy = tuple(greedy_continuation(weights, reference, PROMPTS[0], 4))
    texts = [*TEXTS, (PROMPTS[0], greedy), (PROMPTS[0], (*greedy[:3], greedy[3] ^ 1))]
    found = evaluator.score(texts)
    expected = [reference_score(weights, reference, *text, 12) for text in texts]
    assert [score.logprob for score in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in expected]
    assert (found[3], found[5].is_greedy, found[6].is_greedy) == (Score((), True), True, False)


def test_invalid_arguments_start_no_rank(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    with pytest.raises(UserError, match="the directory has no tokenizer"):
        Evaluator(1, model=tmp_path)
    with pytest.raises(UserError, match="--tp 3 does not fit the model; use 1, 2, 4"):
        Evaluator(1, model=tmp_path, tp=3)
    with pytest.raises(UserError, match="--tpp is not a flag of this program: did you mean --tp"):
        Evaluator(1, model=tmp_path, tpp=3)
    write_checkpoint(tmp_path / "desync", tiny_config(residual_mode="desync", desync_interval=2, desync_tp=2))
    with pytest.raises(UserError, match="--tp 1 does not fit the model; use 2: "):
        Evaluator(1, model=tmp_path / "desync", tp=1)


def test_special_tokens_around_a_text_are_those_of_the_tokenizer_file(tmp_path: Path) -> None:
    library = Tokenizer(BPE({"a": 0, "<s>": 1, "</s>": 2, "<|endoftext|>": 3}, []))
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    library.save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer(tmp_path).added_around() == ((1,), (2,))
    assert ByteTokenizer().added_around() == ((), ())
