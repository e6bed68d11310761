"""The captured decode step: its buffers, with a CPU graph of recorded operators, and the calls to CUDA."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ladder.generate import engine as engine_module
from megatron_ladder.generate import slots
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.requests import Generation, GenerationRequest
from megatron_ladder.generate.sampling import GREEDY, SamplingParameters
from megatron_ladder.model import flash_attention
from megatron_ladder.model.mixers import columns
from tests.reference import greedy_continuation
from tests.unit.generate.tiny_model import (
    MODELS,
    PROMPTS,
    SOMETIMES,
    drafting_reference,
    reference_of,
    tiny_config,
    tiny_engine,
)

aten = torch.ops.aten
NEEDS_PAGES = pytest.mark.skipif(not flash_attention._HAS_PAGES, reason="torch has pages from 2.13 on")
RING = MODELS["windows"]["window_size"]
HOST_COPIES = (aten._local_scalar_dense.default, aten.nonzero.default, aten.lift_fresh.default)
"""Operators that read a value, or the size of a result, or that make a tensor of Python's numbers."""


class Recording(TorchDispatchMode):
    """Records every operator with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST_COPIES, f"{func} copies between host and device, which a capture does not allow"
        result = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, result))
        return result


class OperatorGraph:
    """A `StepGraph` for a CPU. Like CUDA's, a replay repeats operators on the same tensors and runs no Python.

    A capture leaves no valid result.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.closed = False
        self.recording = Recording()

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        self.captures += 1
        step()
        with self.recording:
            return step().fill_(torch.nan)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, recorded in self.recording.operators[:-1]:
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def close(self) -> None:
        self.closed = True


class Graphs:
    """Makes `OperatorGraph`s and keeps no reference to them."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[OperatorGraph]] = []

    def __call__(self) -> OperatorGraph:
        graph = OperatorGraph()
        self.made.append(weakref.ref(graph))
        return graph

    @property
    def alive(self) -> list[OperatorGraph]:
        return [graph for made in self.made if (graph := made()) is not None]


def capturing_engine() -> tuple[GenerationEngine, Graphs]:
    config = tiny_config(num_layers=1)
    engine, graphs = tiny_engine(config), Graphs()
    engine.new_graph = graphs
    return engine, graphs


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the calls from here on in which the host waits for a device; it draws random numbers itself."""
    reads: list[str] = []

    def note(name: str, real: Callable[[Tensor], object]) -> None:
        def noted(tensor: Tensor) -> object:
            if (name, tensor.shape) != ("item", (1,)):
                reads.append(name)
            return real(tensor)

        monkeypatch.setattr(Tensor, name, noted)

    for name in ("cpu", "item", "__bool__", "__int__", "__float__", "nonzero"):
        note(name, getattr(Tensor, name))
    return reads


def check_equal(found: Sequence[Generation], wanted: Sequence[Generation]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects are freed by their reference counts alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", ["hybrid", "ladder-parallel", "lanes", "windows", "sinks", "delta", "latent-ladder"])
def test_captured_decoding_gives_the_same_tokens_with_one_read_for_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**MODELS[name])
    weights, _ = reference_of(config)
    penalised = SamplingParameters(repetition_penalty=1.3, top_p=0.8, logprobs=True)
    sampling = [GREEDY, SamplingParameters(), penalised, SamplingParameters(top_k=9, logprobs=True)]
    requests = [
        GenerationRequest(prompt, 5 + row, replace(sampling[row], seed=row)) for row, prompt in enumerate(PROMPTS)
    ]
    engine, graphs = tiny_engine(config, weights), Graphs()
    expected = engine.generate(requests)
    engine.new_graph = graphs
    reads = noted_reads(monkeypatch)
    for _ in range(2):
        check_equal(engine.generate(requests), expected)
    # The prefill gives the first of 5 to 8 tokens.
    (graph,) = graphs.alive
    assert (graph.captures, graph.replays, reads) == (1, 7 + 7, ["cpu"] * (8 + 8))
    check_equal([engine.generate([request])[0] for request in requests], expected)
    assert len(graphs.made) == 1 and graph.replays == 7 + 7 + 4 + 5 + 6 + 7


@pytest.mark.parametrize("prefill_chunk_size", [None, 3])
@pytest.mark.parametrize("name", ["windows", "sinks", "delta", "delta-parallel"])
def test_a_sequence_sees_no_tokens_of_an_earlier_one(name: str, prefill_chunk_size: int | None) -> None:
    """Captured steps keep their states, which are full of the tokens of a longer sequence."""
    config = tiny_config(**MODELS[name])
    weights, reference = reference_of(config)
    engine, graphs = tiny_engine(config, weights), Graphs()
    engine.new_graph, engine.prefill_chunk_size = graphs, prefill_chunk_size
    for prompt in (tuple(range(20, 40)), (7,), (9, 8), (3, 1, 4, 1, 5), tuple(range(60, 50, -1)), (5, 4, 3)):
        (generation,) = engine.generate([GenerationRequest(prompt, 9, GREEDY)])
        assert list(generation.ids) == greedy_continuation(weights, reference, prompt, 9)
    assert len(graphs.made) == 1


@pytest.mark.usefixtures("no_collector")
def test_a_step_is_captured_again_for_operators_that_it_lacks_and_never_for_one_token() -> None:
    engine, graphs = capturing_engine()
    engine.generate([GenerationRequest((1, 2), 1)])
    assert graphs.made == []
    for parameters in (GREEDY, SamplingParameters(top_k=3), GREEDY, SamplingParameters(top_k=2, seed=7)):
        engine.generate([GenerationRequest((1, 2), 3, parameters)])
    assert len(graphs.made) == 2 and len(graphs.alive) == 1
    engine.close()


@pytest.mark.usefixtures("no_collector")
def test_one_capture_serves_growing_conversations_until_it_is_too_small() -> None:
    engine, graphs = capturing_engine()
    for length in (3, 40, 90):
        engine.generate([GenerationRequest(tuple(range(length)), 4)])
    assert len(graphs.made) == 1
    engine.generate([GenerationRequest((1, 2), 2)] * 3)
    assert len(graphs.made) == 2 and len(graphs.alive) == 1
    unfinished = engine.stream([GenerationRequest((1, 2), 9)])
    next(unfinished)
    (graph,) = graphs.alive
    engine.close()
    assert graph.closed
    del graph
    assert graphs.alive == []
    unfinished.close()


def test_a_replay_is_watched_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: calls.graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: calls.stream)

    @contextmanager
    def waiting() -> Iterator[None]:
        calls.watch()
        yield
        calls.end()

    CudaStepGraph(SimpleNamespace(waiting=waiting)).replay()  # type: ignore[arg-type]
    assert [name for name, *_ in calls.mock_calls] == ["watch", "graph.replay", "stream.synchronize", "end"]


def attend_to_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_q: int,
    max_k: int,
    *options: Any,
    scale: float | None,
    seqused_k: Tensor,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention for `max_q` queries per sequence and sequences of `max_k` keys, some of which are in use, on any
    device. The last query of a sequence sees all of these.

    The real operator receives the arguments as well, on the meta device.
    """
    sequences = len(q) // max_q
    assert query_starts.dtype == key_starts.dtype == seqused_k.dtype == torch.int32
    torch.testing.assert_close(query_starts, torch.arange(sequences + 1, dtype=torch.int32) * max_q)
    torch.testing.assert_close(key_starts, torch.arange(sequences + 1, dtype=torch.int32) * max_k)
    assert (seqused_k.shape, options) == ((sequences,), (0, max_q > 1, False)) and max_k in (256, RING)
    on_meta: dict[str, Any] = {"scale": scale, "seqused_k": seqused_k.to("meta")}
    if block_table is None:
        assert k.shape[:2] == (sequences * max_k, 1)
    else:
        torch.testing.assert_close(block_table, torch.arange(sequences, dtype=torch.int32).view(sequences, 1))
        assert k.shape[:3] == (sequences, max_k, 1)
        on_meta["block_table"] = block_table.to("meta")
    meta = (x.to("meta") for x in (q, k, v, query_starts, key_starts))
    shape, lse_shape, *_ = (x.shape for x in aten._flash_attention_forward(*meta, max_q, max_k, *options, **on_meta))
    keys, values = (x.view(sequences, 1, max_k, -1) for x in (k, v))
    # What is not in use may be anything, so it must not be multiplied by zero either.
    used = seqused_k.view(-1, 1, 1, 1)
    values = values.masked_fill((torch.arange(max_k) >= used).transpose(2, 3), 0)
    unseen = torch.arange(max_k) >= used - torch.arange(max_q - 1, -1, -1).view(-1, 1)
    # [sequences, heads, max_q, d]
    queries = q.unflatten(0, (sequences, max_q)).transpose(1, 2)
    result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=~unseen, scale=scale, enable_gqa=True)
    scores = (queries @ keys.mT * scale).masked_fill(unseen, -torch.inf)
    attended, lse = result.transpose(1, 2).flatten(0, 1), scores.logsumexp(-1).transpose(1, 2).flatten(0, 1).t()
    assert (attended.shape, lse.shape) == (shape, lse_shape)
    return attended, lse


@pytest.mark.parametrize("paged", [False, pytest.param(True, marks=NEEDS_PAGES)], ids=["rows", "pages"])
@pytest.mark.parametrize(
    ("name", "captured"),
    [("ladder", True), ("hybrid", False), ("ladder-parallel", True), ("windows", True), ("sinks", True)],
)
def test_attention_to_filled_columns_gives_the_same_tokens(
    name: str, captured: bool, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two and four heads share a key-value head; prompts are padded as on a GPU."""
    config = tiny_config(**MODELS[name])
    weights, _ = reference_of(config)
    requests = [GenerationRequest(prompt, 4 + row, GREEDY) for row, prompt in enumerate(PROMPTS)]
    plain = tiny_engine(config, weights)
    expected = [generation.ids for generation in plain.generate(requests)], plain.score(PROMPTS[3])
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(arguments[0]))
        # Rings are no multiples of a page.
        assert ("block_table" in options) == (paged and arguments[6] != RING)
        return attend_to_sequences(*arguments, **options)

    monkeypatch.setattr(flash_attention, "flash_attention_forward", counted)
    monkeypatch.setattr(flash_attention, "_HAS_PAGES", paged)
    monkeypatch.setattr(columns, "counts_filled_columns", lambda *arguments: True)
    for module in (slots, engine_module):
        monkeypatch.setattr(module, "prompt_width", lambda longest, positions, device: min(16, positions))
    engine = tiny_engine(config, weights)
    if captured:
        engine.new_graph = Graphs()
    assert [generation.ids for generation in engine.generate(requests)] == expected[0]
    assert engine.score(PROMPTS[3]) == pytest.approx(expected[1], rel=1e-5)
    steps = 2 if captured else 6
    assert calls == [len(requests) * config.num_key_value_heads] * (config.num_layers * steps)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["standard", "ladder-parallel", "windows", "sinks"])
def test_drafts_attend_to_filled_columns(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers but those with windows, and the head's for one draft after the other."""
    config = tiny_config(**MODELS[name] | {"mtp_num_layers": 1})
    weights, _ = drafting_reference(config, *SOMETIMES)
    requests = [GenerationRequest(prompt, 14 + row, GREEDY) for row, prompt in enumerate(PROMPTS)]
    expected = tiny_engine(config, weights, draft_tokens=2).generate(requests)
    lengths: list[int] = []

    def counted(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        lengths.append(arguments[5])
        return attend_to_sequences(*arguments, **options)

    monkeypatch.setattr(flash_attention, "flash_attention_forward", counted)
    monkeypatch.setattr(columns, "counts_filled_columns", lambda *arguments: True)
    engine = tiny_engine(config, weights, draft_tokens=2)
    if captured:
        engine.new_graph = Graphs()
    found = engine.generate(requests)
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert found[0].timings.accepted_length == expected[0].timings.accepted_length
    whole = config.num_layers - len(config.window_layers)
    assert lengths == [3, 1, *[3] * whole] * (len(lengths) // (2 + whole)) and lengths


def test_latents_are_attended_to_without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs where it is available for heads of other models."""
    config = tiny_config(**MODELS["latent"])
    requests = [GenerationRequest(prompt, 4 + row, GREEDY) for row, prompt in enumerate(PROMPTS)]
    expected = [generation.ids for generation in tiny_engine(config).generate(requests)]
    monkeypatch.setattr(flash_attention, "flash_attention_forward", Mock(side_effect=AssertionError))
    monkeypatch.setattr(columns, "counts_filled_columns", lambda *arguments: True)
    assert [generation.ids for generation in tiny_engine(config).generate(requests)] == expected
