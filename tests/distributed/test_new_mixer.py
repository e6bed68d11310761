"""A token mixer added as docs/code.md describes: a class in each of two tables, and nothing else of the package.

The mixer is a moving average of each channel over the tokens of a document, with a trained rate for each head:

    y_t = a y_{t-1} + (1 - a) x_t

Even layers have it, and odd layers have attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from unittest import mock

import pytest
import torch
from scipy.signal import lfilter
from torch import Tensor, nn

from ladder_lab.cost.inference import InferenceRequest, inference_memory
from ladder_lab.cost.layout import Layout
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.memory import stage_memory
from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.mixers.mixer import Mixer, StateKind, StateSpec
from megatron_ladder.blueprint.mixers.table import MIXERS
from megatron_ladder.blueprint.model import ModelConfig, state_bytes
from megatron_ladder.blueprint.specs import Branch, Role, TensorSpec, column, row
from megatron_ladder.blueprint.tensors import layer_tensors, parameter_count
from megatron_ladder.blueprint.wiring import BranchKind
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.conversions import plan_export
from megatron_ladder.convert.options import ExportOptions
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import Generation, GenerationRequest, Timings
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.generate.slots import SlotBatch
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mixers.mixer import Heads
from megatron_ladder.model.mixers.table import HEADS
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.sub_block import SequenceContext
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, mesh_of, small_model
from tests.helpers.steps import GENTLE_RECIPE, STEPS, check_same, interrupted, launch_of, steps_of_batches, train
from tests.unit.generate.tiny_model import PROMPTS

P = ParamSpec("P")
R = TypeVar("R")
NEW_TOKENS = 8


class MovingAverage(Mixer):
    """The description: `x` are the averaged channels, and `a` is the sigmoid of `rate`."""

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> Mixer | None:
        return None if layer % 2 else cls(config)

    @property
    def name(self) -> str:
        return "moving average"

    def branch(self, name: str) -> Branch:
        config, heads = self.config, self.config.num_attention_heads
        width = heads * config.head_dim
        inputs = {"x": column(f"{name}.x_proj", width, config, False, heads)}
        inner = {"rate": TensorSpec(f"{name}.rate", (heads,), Role.VECTOR, 0, mean=0.5, std=1.0)}
        output = row(f"{name}.o_proj", width, config, False, block=config.head_dim)
        return Branch(BranchKind.MIXER, inputs, output, mixer=self, inner=inner)

    def states(self, parts: int) -> Sequence[StateSpec]:
        shape = self.config.num_attention_heads // parts, self.config.head_dim
        return [StateSpec("average", shape, StateKind.FIXED, is_fp32=True)]

    def flops(self, tokens: int, positions: float) -> float:
        return 3 * tokens * self.config.num_attention_heads * self.config.head_dim

    def kept_numbers(self, ranks: int) -> int:
        return 0


class AverageInputs(NamedTuple):
    """What all layers share."""

    begins: Tensor | None = None
    """[s, b, 1, 1] bool, in training: where documents begin; None: each row is one."""
    is_token: Tensor | None = None
    """[s, b, 1, 1] bool, in prompts: False for padding."""


class MovingAverageHeads(Heads):
    """The computation."""

    rate: nn.Parameter
    """[heads/t]."""

    def __init__(self, build: BuildContext, number: int, branch: Branch) -> None:
        super().__init__(build, number, branch)
        self.add_parameter("rate", [branch.inner["rate"]], build)

    def prepare(self, context: SequenceContext) -> AverageInputs:
        if context.documents is not None:
            begins = torch.zeros(sum(context.documents.lengths), dtype=torch.bool)
            begins[context.documents.bounds[:-1].long()] = True
            return AverageInputs(begins=begins.view(-1, len(context.positions)).t()[..., None, None])
        if context.states is None or context.states.lengths is None:
            return AverageInputs()
        return AverageInputs(is_token=(context.positions < context.states.lengths)[..., None, None])

    def forward(self, projected: Tensor, context: SequenceContext) -> Tensor:
        inputs: AverageInputs = context.prepared[self.mixer.name]
        x = projected.unflatten(-1, (len(self.rate), -1))
        rate = torch.sigmoid(self.rate).unsqueeze(1)
        average, states = torch.zeros_like(x[0]), context.states
        if states is not None and not states.begins:
            average = states.tensors[self.number]["average"][: x.shape[1]].to(x.dtype)
        averages = []
        for position, token in enumerate(x):
            if inputs.begins is not None:
                average = average.masked_fill(inputs.begins[position], 0.0)
            following = rate * average + (1 - rate) * token
            average = following if inputs.is_token is None else following.where(inputs.is_token[position], average)
            averages.append(average)
            if states is not None and states.lengths is None:
                states.fixed_after(self.number, position)["average"][: x.shape[1]] = average
        if states is not None and states.lengths is not None:
            states.tensors[self.number]["average"][: x.shape[1]] = average
        return torch.stack(averages).flatten(2)


@contextmanager
def with_the_mixer() -> Iterator[None]:
    """Add the rows of the two tables."""
    rows = mock.patch("megatron_ladder.blueprint.model.MIXERS", (MovingAverage, *MIXERS))
    heads = mock.patch.dict(HEADS, {MovingAverage: MovingAverageHeads})
    layer_tensors.cache_clear()
    with rows, heads:
        yield
    layer_tensors.cache_clear()


@pytest.fixture
def added_mixer() -> Iterator[None]:
    with with_the_mixer():
        yield


def on_rank(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Call a function on each rank with the mixer in its tables."""
    with with_the_mixer():
        return function(*args, **options)


def new_model(config: ModelConfig, mesh: ProcessMesh) -> LanguageModel:
    return LanguageModel(config, mesh, dtype=torch.float64, seed=3)


@pytest.mark.usefixtures("added_mixer")
def test_averages_are_those_of_a_filter_of_scipy() -> None:
    config = small_model(num_layers=1)
    heads = new_model(config, ProcessMesh.single()).stack.layers["0"].bodies["attention"].heads
    projected = torch.randn(12, 2, 32, dtype=torch.float64)
    model = new_model(config, ProcessMesh.single())
    bounds = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    context = model.training_context(torch.zeros(2, 12), document_bounds=bounds)
    averages = heads(projected, context).detach().unflatten(-1, (4, -1))
    rows = projected.unflatten(-1, (4, -1)).transpose(0, 1).flatten(0, 1)
    for head, rate in enumerate(torch.sigmoid(heads.rate.detach()).tolist()):
        for begin, end in ((0, 5), (5, 12), (12, 24)):
            expected = lfilter([1 - rate], [1, -rate], rows[begin:end, head].numpy(), axis=0)
            found = averages.transpose(0, 1).flatten(0, 1)[begin:end, head]
            assert torch.allclose(found, torch.from_numpy(expected), rtol=1e-12)


def joined(pieces: Pieces) -> dict[str, Tensor]:
    """Return the whole tensors of one rank, which has several parts of them if it has lanes."""
    tensors: dict[str, Tensor] = {}
    for name, offset, values in sorted(pieces, key=lambda piece: piece[:2]):
        cut = [dim for dim, start in enumerate(offset) if start]
        tensors[name] = torch.cat((tensors[name], values), cut[0]) if cut else values
    return tensors


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("2x1x1", "--residual-mode ladder"),
        ("2x1x1", "--residual-mode ladder-parallel --sequence-parallel --recompute-granularity full"),
        ("2x2x1", "--residual-mode standard --zero-stage 1"),
        ("2x1x1", "--residual-mode ladder --lanes 4 --num-key-value-heads 4"),
    ],
)
def test_training_does_not_depend_on_the_layout(gloo_pools: GlooPools, layout: str, words: str) -> None:
    batches = steps_of_batches(STEPS, 4)
    plain = [*words.replace("--sequence-parallel", "").split(), "--global-batch-size", "8"]
    world, argv = launch_of(layout, words, "--global-batch-size 8")
    ((history, pieces),) = gloo_pools(1).run(on_rank, train, [*GENTLE_RECIPE, *plain], None, batches)
    expected = joined(pieces)
    assert "layers.0.attention.rate" in expected and "layers.1.attention.q_proj.weight" in expected
    results = gloo_pools(world).run(on_rank, train, [*GENTLE_RECIPE, *argv], None, batches)
    for found, _ in results:
        for step, step_alone in zip(found, history, strict=True):
            assert step == pytest.approx(step_alone, rel=1e-5)
    assert_pieces([rank for _, rank in results], expected, 2e-4)


def test_resumed_training_is_bitwise_the_same_and_export_is_refused(gloo_pools: GlooPools, tmp_path: Path) -> None:
    batches = steps_of_batches(STEPS, 4)
    world, argv = launch_of("2x1x1", "--residual-mode ladder --global-batch-size 8")
    whole = gloo_pools(world).run(on_rank, train, [*GENTLE_RECIPE, *argv], None, batches)
    save = tmp_path / "save"
    check_same(whole, gloo_pools(world).run(on_rank, interrupted, [*GENTLE_RECIPE, *argv], batches, save, STEPS - 1))
    with with_the_mixer(), pytest.raises(UserError, match="moving average.*generate from the checkpoint instead"):
        plan_export(ExportOptions(load=save, hf=tmp_path / "hf"))


def generate(config: ModelConfig, ranks: int, chunk: int | None, drafts: int) -> tuple[list[Generation], list[Any]]:
    """On each rank: continue prompts, and score the same continuations without states."""
    mesh = mesh_of(ranks)
    model = new_model(config, mesh)
    batch = SlotBatch(model, mesh.tensor, None, None, len(PROMPTS), config.max_position_embeddings, chunk, drafts)
    greedy = SamplingParameters(temperature=0.0, logprobs=True)
    # The second time, states hold what was stored the first time.
    for _ in range(2):
        batch.begin([GenerationRequest(ids, NEW_TOKENS, greedy) for ids in PROMPTS])
        while batch.is_busy():
            batch.step()
    generations = batch.results(Timings(0.0, 0.0, None))
    texts = [(generation.prompt_ids, generation.ids) for generation in generations]
    return generations, GenerationEngine(model, mesh).score_batch(texts)


@pytest.mark.parametrize(
    ("ranks", "chunk", "drafts"), [(1, None, 0), (1, 1, 0), (1, 2, 0), (2, None, 0), (2, 5, 0), (1, None, 2), (2, 2, 1)]
)
def test_generation_equals_recomputation(gloo_pools: GlooPools, ranks: int, chunk: int | None, drafts: int) -> None:
    """Prompts of unequal lengths, in parts; with drafts, most of which are wrong."""
    config = small_model(init_method_std=0.3, num_layers=3, mtp_num_layers=min(drafts, 1))
    for generations, scores in gloo_pools(ranks).run(on_rank, generate, config, ranks, chunk, drafts):
        for generation, score in zip(generations, scores, strict=True):
            assert score.is_greedy
            assert generation.logprobs == pytest.approx(score.logprobs, rel=1e-9)


@pytest.mark.usefixtures("added_mixer")
def test_counts() -> None:
    """Two of four layers have the mixer: [32, 32] in and out and four rates, and an average of 32 numbers in fp32."""
    config = small_model(max_position_embeddings=65)
    plain = ModelFlops(small_model(max_position_embeddings=66), 10)
    norms_and_mlp = 2 * 32 + 3 * 32 * 48
    of_mixers = 2 * 32 * 32 + 4, 2 * 32 * 32 + 2 * 32 * 16
    assert parameter_count(config).layers == tuple(norms_and_mlp + number for number in of_mixers * 2)
    layers = ModelFlops(config, 10).layers
    assert layers[0] == 2 * 10 * (2 * 32 * 32 + 3 * 32 * 48) + 3 * 10 * 32
    assert layers[1] == plain.layers[1] == 2 * 10 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 4 * 10 * 10 * 32
    assert state_bytes(config, 2, 100, 2) == 2 * 16 * 4 + 2 * 100 * 2 * 8 * 2
    request = InferenceRequest(config, Machine.usual("h100"), 2, 3, 90, 10)
    assert inference_memory(request).cache == 3 * state_bytes(config, 2, 100, 2)
    assert stage_memory(config, Layout(tensor=2), 0, 64, 1, "bf16").activations > 0
