"""Speed of decoding and loading compared with the memory bandwidth. Run with `-s` to see the numbers."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.loading import load_model, open_model
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of
from tests.unit.generate.tiny_model import reference_of, tiny_config, tiny_engine, write_checkpoint

GIGABYTE = 1 << 30
DECODE_ROUNDS, PROMPT_TOKENS, NEW_TOKENS = 15, 64, 64
DECODE_SHARE = 0.80
LOAD_ROUNDS = 9
LOAD_FACTOR, VERIFIED_FACTOR = 2.0, 1.5
CPU = torch.device("cpu")


def spread(name: str, figures: list[float]) -> str:
    return f"{name} {statistics.median(figures):.3f} ({min(figures):.3f} to {max(figures):.3f})"


@pytest.mark.slow
def test_decoding_is_close_to_the_memory_bandwidth() -> None:
    """Decode with 134 million fp32 parameters on one thread. The limit is the time to read a token's weights at the
    rate of a matrix-vector product of 1 GiB, measured before and after each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = tiny_config(
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=2048,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=512,
    )
    engine = tiny_engine(config, reference_of(config)[0], packed=True)
    weights = sum(weight.nbytes for name, weight in engine.model.named_parameters() if not name.startswith("embedding"))
    matrix, vector = torch.randn(GIGABYTE // 4 // 16384, 16384), torch.randn(16384)
    prompt = torch.randint(0, config.vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0))
    request = GenerationRequest(tuple(prompt.tolist()), NEW_TOKENS + 1, GREEDY)

    def limit() -> float:
        """Return the seconds to read the weights."""
        begun = time.perf_counter()
        torch.mv(matrix, vector)
        return (time.perf_counter() - begun) * weights / matrix.nbytes

    def token() -> float:
        stream = engine.stream([request])
        next(stream)
        times = []
        for _ in range(NEW_TOKENS):
            begun = time.perf_counter()
            next(stream)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    limit(), token()
    rounds = [(limit(), token(), limit()) for _ in range(DECODE_ROUNDS)]
    shares = [(before + after) / 2 / decoded for before, decoded, after in rounds]
    print(f"\n{spread('ms a token', [1e3 * decoded for _, decoded, _ in rounds])}")
    rates = [weights / seconds / 1e9 for before, _, after in rounds for seconds in (before, after)]
    print(spread("GB/s of the product", rates))
    print(spread("share of the memory's limit", shares))
    torch.set_num_threads(threads)
    assert statistics.median(shares) >= DECODE_SHARE


def read_and_load(folder: Path) -> list[tuple[float, ...]]:
    """Return the seconds to read a rank's half of the bytes into fresh memory, to read it into reused memory, and to
    load the model without and with verification, on all ranks at the same time."""
    (file,) = folder.glob("iter_*/*.safetensors")
    count = file.stat().st_size // dist.get_world_size()

    def read(size: int) -> None:
        room = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
        remaining = count
        with open(file, "rb", buffering=0) as opened:
            opened.seek(dist.get_rank() * count)
            while remaining > 0 and (found := opened.readinto(room[count - remaining :] if size == count else room)):
                remaining -= found

    def load(verify: bool) -> None:
        load_model(open_model(folder, None, None), mesh_of(2, 1), torch.float32, CPU, overlap=True, verify=verify)

    def timed(work: Callable[[], None]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - begun

    work = (lambda: read(count), lambda: read(1 << 20), lambda: load(False), lambda: load(True))
    return [tuple(map(timed, work)) for _ in range(LOAD_ROUNDS + 1)][1:]


@pytest.mark.slow
def test_loading_is_close_to_reading(tmp_path: Path, gloo_pools: GlooPools) -> None:
    """Load 1 GiB of fp32 weights on two running ranks, of which one verifies; the file is in the page cache."""
    config = tiny_config(
        num_layers=15,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=512,
    )
    pairs = parameter_sections(LanguageModel(config, ProcessMesh.single(), seed=0))
    weights = {part.name: part.view(parameter).detach() for parameter, parts in pairs for part in parts}
    write_checkpoint(tmp_path, config, weights)
    rounds = gloo_pools(2).run_within(300, read_and_load, tmp_path)[0]
    fresh, again, loads, verified = (list(column) for column in zip(*rounds, strict=True))
    print(f"\n{spread('s to read to fresh memory', fresh)}\n{spread('s to read to reused memory', again)}")
    print(f"{spread('s to load', loads)}\n{spread('s to load and verify', verified)}")
    ratios = [load / read for load, read in zip(loads, fresh, strict=True)]
    print(spread("loading / reading", ratios))
    shares = [more / load for more, load in zip(verified, loads, strict=True)]
    print(spread("with / without verification", shares))
    assert statistics.median(ratios) <= LOAD_FACTOR
    assert statistics.median(shares) <= VERIFIED_FACTOR
