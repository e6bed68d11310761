"""Predictions of a model in training, in many layouts, compared with a plain model in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.train.evaluation import Predictor
from tests.helpers.pool import GlooPools
from tests.helpers.training import build_trainer_here, run_of
from tests.reference import ReferenceConfig, make_weights
from tests.reference.model import greedy_continuation, reference_logits

RECIPE = "--train-iters 4 --lr 1e-2 --micro-batch-size 2 --global-batch-size 4".split()
TP, PP, DP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--zero-stage"
LAYOUTS = [
    f"{TP} --residual-mode ladder --ladder-layers 1-2 --sequence-parallel --tie-embeddings",
    f"{TP} --residual-mode desync --desync-interval 4 --vocab-size 500",
    f"{PP} --residual-mode ladder --residual-staleness 2 --zero-stage 0",
    f"{DP} 1 --residual-mode ladder-parallel",
    f"{DP} 3 --residual-mode ladder",
    f"{DP} 1 --residual-mode farskip --num-experts 4 --expert-model-parallel-size 2",
]
GENERATOR = torch.Generator().manual_seed(3)
TEXTS = [torch.randint(0, 101, (n,), generator=GENERATOR).tolist() for n in (2, 9, 5, 13, 3, 16, 4)]
REQUESTS = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in TEXTS]
PROMPTS = [text[:4] for text in TEXTS[:5]]


def predict(argv: list[str], weights: Mapping[str, Tensor]) -> Any:
    """On each rank: return scores and continuations."""
    predictor = Predictor(build_trainer_here([*RECIPE, *argv], weights))
    greedy = [(prompt, following) for prompt, following in zip(PROMPTS, predictor.generate(PROMPTS, 5), strict=True)]
    with pytest.raises(ValueError, match="request 1: id 500 is outside of the vocabulary, 0 to "):
        predictor.score([([1], [2]), ([1], [500])])
    return predictor.score([*REQUESTS, *greedy]), [following for _, following in greedy]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_continuations_are_those_of_a_plain_model(gloo_pools: GlooPools, layout: str) -> None:
    config = ReferenceConfig.like(run_of([*RECIPE, *layout.split()], 2).model)
    weights = make_weights(config, seed=1, dtype=torch.float32)
    continuations = [greedy_continuation(weights, config, prompt, 5) for prompt in PROMPTS]
    expected = []
    for context, following in [*REQUESTS, *zip(PROMPTS, continuations, strict=True)]:
        # A row has 12 positions; the beginning of a longer text is cut off.
        ids = torch.tensor([*context, *following])[-13:]
        logprobs = reference_logits(weights, config, ids[None, :-1])[0].log_softmax(-1)[-len(following) :]
        targets = ids[-len(following) :]
        likeliest = bool((logprobs.argmax(-1) == targets).all())
        expected.append((logprobs.gather(1, targets[:, None]).sum().item(), likeliest))
    for scores, generated in gloo_pools(2).run(predict, layout.split(), weights):
        assert generated == continuations
        assert [score.is_greedy for score in scores] == [is_greedy for _, is_greedy in expected]
        assert [score.logprob for score in scores] == pytest.approx([logprob for logprob, _ in expected], rel=1e-4)
    assert {is_greedy for _, is_greedy in expected} == {True, False}
