"""Trials with the same seed share initial weights also if a wiring needs two ranks."""

from pathlib import Path

from ladder_lab.study.trials import Request, Trial, resolve_trial
from megatron_ladder.blueprint.model import key_value_replicas
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, mesh_of
from tests.unit.ladder_lab.test_study import SIZE, matrices


def initial_matrices(wiring: str, seed: int) -> Pieces:
    """Return this rank's parts of all initial weights except norms."""
    run = resolve_trial(Request(Path("out"), {}, 1), Trial("tokens", SIZE, wiring, seed, 1e-3, 10))
    ranks = run.parallel.tensor_model_parallel_size
    model = LanguageModel(run.model, mesh_of(ranks, key_value_replicas(run.model, ranks)), seed=run.training.seed)
    return [
        (section.name, section.box.offset, section.view(parameter).detach().clone())
        for parameter, sections in parameter_sections(model)
        for section in sections
        if parameter.dim() == 2 and "norm" not in section.name
    ]


def test_desync_starts_from_the_weights_of_standard(gloo_pools: GlooPools) -> None:
    assert_pieces(gloo_pools(2).run(initial_matrices, "desync-2x", 3), matrices("standard", 3), 0.0)
