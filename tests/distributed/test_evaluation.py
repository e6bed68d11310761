"""Evaluations of a model in training, in many layouts, compared with a plain model in one process."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.loader import OrderOptions, open_sources
from megatron_ladder.data.tokenizers import NullTokenizer
from megatron_ladder.train import loop
from megatron_ladder.train.evaluation import Evaluations, Predictor
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.loop import OpenRun
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.record import RunRecord, read_record
from tests.helpers.pool import GlooPools
from tests.helpers.tokens import write_tokens
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


def train(argv: list[str], prefixes: Sequence[str], save: Path) -> None:
    """On each rank: train with evaluations."""
    trainer = build_trainer_here([*RECIPE, *argv, "--tokenizer-type", "NullTokenizer"])
    run, record = trainer.run, RunRecord(save, trainer.mesh.world.rank)
    train_set, *valid_sets = prefixes
    named = [f"web={valid_sets[0]}", "code=0.5", valid_sets[0], "2", valid_sets[1]]
    data = DataConfig(train_data_path=(Path(train_set),), valid_data_path=tuple(map(Path, named)))
    sources = open_sources(data, OrderOptions(run.training.seq_length, 1))
    prompts = (("5 6", (5, 6)), ("7", (7,)))
    inputs = RunInputs(run=run, tokenizer=NullTokenizer(100), sources=sources, sample_prompts=prompts)
    stopper: Any = mock.MagicMock(votes=lambda: [0.0], reason=lambda *_: None)
    batches = sample_batches(trainer, sources.train, 0)
    opened = OpenRun(trainer, inputs, batches, mock.MagicMock(), record, iteration=0)
    with mock.patch.object(loop, "HangWatch"):
        loop._train(opened, Evaluations(trainer, inputs), stopper)


@pytest.mark.parametrize("layout", [PP, DP + " 3"])
def test_all_evaluations_are_recorded(gloo_pools: GlooPools, tmp_path: Path, layout: str) -> None:
    prefixes = [str(write_tokens(tmp_path / str(seed), seed=seed)) for seed in range(3)]
    more = "--log-interval 4 --eval-interval 2 --eval-iters 1 --sample-prompts p --sample-tokens 3"
    gloo_pools(2).run(train, f"{layout} {more}".split(), prefixes, tmp_path)
    events = [event for event in read_record(tmp_path) if event["event"] != "progress"]
    names = [(event["event"], event["iteration"], event.get("name", event.get("prompt"))) for event in events]
    each = [("evaluation", "web"), ("evaluation", "code"), ("sample", "5 6"), ("sample", "7")]
    assert names == [(kind, iteration, name) for iteration in (2, 4) for kind, name in each]
    for event in events:
        if event["event"] == "evaluation":
            assert event["ppl"] == pytest.approx(math.exp(event["loss"])) and event["ppl"] > 1
    assert all(len(event["text"].split()) == 3 for event in events if event["event"] == "sample")
