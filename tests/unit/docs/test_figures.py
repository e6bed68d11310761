"""Tables and pictures of the pages show what the code computes and what was measured."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from ladder_lab.bench.sizes import find_size
from ladder_lab.cost.inference import InferenceRequest, predict_inference
from ladder_lab.cost.machines import PRESETS
from ladder_lab.plan.options import MachineOptions
from ladder_lab.study.figures import number, paired, with_interval
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, resolve_model
from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.blueprint.wiring import WIRINGS, SubBlockKind, WiredSubBlock
from megatron_ladder.model.mixers.mixer import States
from tests.docs.pages import ROOT, Row, page_paths, read_page, table
from tools.plan import main as plan

PICTURES = ROOT / "docs" / "pictures"
LETTERS = {"attention": "A", "attention_2": "A", "mlp": "M", "mlp_2": "M", "shared_expert": "S", "routed_experts": "R"}


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the caption and the content of every drawn picture on the pages."""
    for page in page_paths():
        for caption, target in re.findall(r"!\[([^\]]*)\]\(([^)]*pictures/[^)]*\.svg)\)", read_page(page)):
            yield caption, ((ROOT / page).parent / target).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_in_units_of_c_defines_c(path: Path) -> None:
    texts = re.findall(r">([^<]+)</text>", path.read_text(encoding="utf-8"))
    assert not any(re.search(r"\d c\b", text) for text in texts) or any("c: the time" in text for text in texts)


def test_a_caption_that_names_wirings_names_all_of_the_picture() -> None:
    named = 0
    for caption, picture in pictures():
        wirings = {word for word in re.findall(r"[\w-]+", caption) if word in WIRINGS}
        titles = set(re.findall(r'<text x="24" y="[\d.]+" font-size="14"[^>]*>([^<]+)<', picture))
        if wirings and titles:
            assert wirings == titles, caption
            named += 1
    assert named > 0


def row_of_wiring(sub_blocks: Sequence[tuple[int, WiredSubBlock]], before: Sequence[SubBlockKind]) -> Row:
    """Return the order, what each kind misses, and the number of all-reduces of numbered sub-blocks of a model."""
    misses: dict[str, str] = {}
    for index, one in sub_blocks:
        missed = sorted(LETTERS[before[index - back].value] for back in one.missing)
        misses[LETTERS[one.kind.value]] = ", ".join(missed) or "nothing"
    order = ", ".join(LETTERS[one.kind.value] for _, one in sub_blocks)
    shared = misses.get("S", misses.get("M", ""))
    return [
        order,
        misses["A"],
        shared,
        misses.get("R", "(no R)"),
        str(sum(not one.joins_next for _, one in sub_blocks)),
    ]


def cache_bytes(config: ModelConfig, ranks: int) -> str:
    """Return the bytes per token of the states that a rank allocates."""
    states = States.allocate(config, ranks, 1, 10, torch.bfloat16, torch.device("meta"))
    return f"{sum(state.nbytes for of_mixer in states.tensors for state in of_mixer.values()) // 10:,}"


def test_the_table_of_latent_caches_is_what_generation_allocates() -> None:
    """A head of another model that is as wide as key and value together has their cache."""
    rows = table("docs/moe.md", "## Latent attention")
    assert len(rows) == 4
    for name, of_latents, *of_heads in rows:
        config = find_size(name.lower())
        heads, width = config.num_attention_heads, config.head_dim + config.mixer_of(0).value_dim
        plain = replace(config, kv_lora_rank=0, num_key_value_heads=heads, head_dim=width // 2)
        for ranks, cell in zip((1, 2, 8), of_heads, strict=True):
            if heads % ranks:
                assert cell == f"({heads} heads)"
            else:
                assert (cache_bytes(config, ranks), cache_bytes(plain, ranks)) == (of_latents, cell), name


def test_the_table_of_expert_wirings_is_that_of_the_blueprint() -> None:
    documented = [[*cells[1:-1], cells[-1][0]] for cells in table("docs/moe.md", "order in a layer")]
    expected = []
    for mode in ("farskip", "shortcut", "longcat"):
        shared_width = 0 if mode == "longcat" else 256
        flags = ModelFlags(
            residual_mode=mode, num_layers=3, num_experts=8, moe_shared_expert_intermediate_size=shared_width
        )
        layers = resolve_model(flags, 256, 256, 1).wired_layers
        numbered = list(enumerate(one for layer in layers for one in layer))
        kinds = [one.kind for _, one in numbered]
        size = len(layers[0])
        layer = numbered[size : 2 * size]
        halves = [layer[:3], layer[3:]] if mode == "longcat" else [layer]
        expected += [row_of_wiring(half, kinds) for half in halves]
    assert documented == expected


@pytest.mark.parametrize(
    ("heading", "columns", "files"),
    [
        ("## Decode", "ladder parallel ladder-parallel staleness-2 no-comm", ["decode", "decode-llama"]),
        ("## Prefill", "ladder parallel ladder-parallel no-comm", ["prefill"]),
        ("## Training", "ladder parallel ladder-parallel ladder-autograd no-comm", ["train"]),
        (
            "Training, as `standard / wiring (model)`.",
            "standard-early-weights farskip staleness-2 shortcut",
            ["train-ep", "train-ep-unshared"],
        ),
        ("The forward pass alone:", "farskip staleness-2 shortcut", ["forward-ep", "forward-ep-unshared"]),
    ],
)
def test_the_tables_of_the_benchmark_are_those_of_its_files(heading: str, columns: str, files: list[str]) -> None:
    measured: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for name in files:
        for row in json.loads((ROOT / "docs" / "benchmark" / f"{name}.json").read_text(encoding="utf-8")):
            measured.setdefault((row["size"], row["alpha"]), {})[row["wiring"]] = row
    expected = []
    for (size, alpha), by_wiring in measured.items():
        seconds = by_wiring["standard"]["alpha_seconds"]
        has_experts = size.startswith("small-ep")
        label = "Llama-shaped, " if size == "small-llama" else ""
        cells = [size] if has_experts else []
        cells.append(f"{label}{alpha} = {1e3 * seconds:.2f} ms" if seconds else "0")
        cells.append(f"{1e3 * by_wiring['standard']['median_seconds']:.1f}")
        for wiring in columns.split():
            row = by_wiring.get(wiring)
            predicted = "" if row is None or wiring == "no-comm" else f" ({row['predicted_ratio']:.2f})"
            cells.append("" if row is None else f"{row['ratio_to_standard']:.2f}{predicted}")
            assert row is None or (0 if has_experts else 0.005) <= row["spread"] < 0.125, wiring
        expected.append(cells)
    assert table("docs/benchmark.md", heading) == expected


@cache
def tokens_per_second(size: str, wiring: str, batch: int, p2p: str, ranks: int = 8) -> float:
    """Predict the paper's setting."""
    model = NAMED_WIRINGS[wiring].of(find_size(size), ranks)
    machine = MachineOptions(link="nvlink" if p2p == "on" else "no-p2p").machine(ranks)
    request = InferenceRequest(model, machine, ranks, batch, 1024, 512, 16, attention="expanded")
    return batch * 512 / predict_inference(request).total


def speed_up(size: str, batch: int, p2p: str, ranks: int = 8) -> str:
    ladder, standard = (tokens_per_second(size, wiring, batch, p2p, ranks) for wiring in ("ladder", "standard"))
    return f"{ladder / standard:.2f}"


def test_the_predictions_of_the_paper_page_are_the_planner_s() -> None:
    by_batch = {(name, p2p): cells for name, p2p, *cells in table("docs/paper.md", "**Llama 70B by batch size.**")}
    by_size = {(name, p2p): cells for name, p2p, *cells in table("docs/paper.md", "**All sizes at batch 4.**")}
    sizes = "paper-1.2b paper-3.5b-tp8 llama-8b llama-34b llama-70b bloom-176b".split()
    for p2p in ("on", "off"):
        standard = [f"{tokens_per_second('llama-70b', 'standard', batch, p2p):.1f}" for batch in (1, 4, 16, 64)]
        assert by_batch["standard, predicted", p2p] == standard
        assert by_batch["ladder, predicted", p2p] == [speed_up("llama-70b", batch, p2p) for batch in (1, 4, 16, 64)]
        assert by_size["predicted", p2p][:-1] == [speed_up(size, 4, p2p) for size in sizes]
    assert by_size["predicted", "on"][-1] == speed_up("llama-405b", 4, "on", 16)
    models = [("paper-1.2b", "standard"), ("paper-1.5b", "ladder")]
    models += [("paper-3.5b-tp8", "standard"), ("paper-4.5b-tp8", "ladder")]
    equally_fast = [cells[-1] for cells in table("docs/paper.md", "**Models of equal speed**")]
    assert equally_fast == [f"{tokens_per_second(size, wiring, 4, 'on'):.1f}" for size, wiring in models]


def percent_gained(words: str, folder: Path, baseline: str = "wirings") -> dict[str, str]:
    """Run the planner, and return what each wiring gains over standard."""
    plan(["inference", *words.split(), "--json", str(folder / "plan.json")])
    wirings = json.loads((folder / "plan.json").read_text(encoding="utf-8"))[baseline]
    return {one["wiring"]: f"{100 * one['speed_up'] - 100:.0f}" for one in wirings}


def test_pages_state_what_a_ladder_gains_on_the_kernels_of_today(tmp_path: Path) -> None:
    nccl, one_shot = (percent_gained("--model 70b", tmp_path, baseline) for baseline in ("wirings", "one_shot"))
    ladder, bound = ((one_shot[name], nccl[name]) for name in ("ladder", "no-comm"))
    words = ["--gpu rtx-pro-6000 --tp 4 --weight-bits 8 --batch 16", "--model 405b --tp 16"]
    pcie, boxes = (percent_gained(one, tmp_path)["ladder"] for one in words)
    pages = {page: " ".join(read_page(page).split()) for page in ("README.md", "docs/plan.md", "docs/paper.md")}
    assert (
        f"Llama 70B gains {ladder[0]} % with ladder and at most {bound[0]} % with any wiring, instead of {ladder[1]} "
        f"and {bound[1]} % with NCCL (predicted: `python tools/plan.py inference --model 70b`). Late reads pay over "
        f"PCIe ({pcie} %: `{words[0]}`) and between boxes ({boxes} %: `{words[1]}`)" in pages["README.md"]
    )
    of_one_shot, of_nccl = (1e6 * PRESETS[name].seconds(64 * 2**10, 8) for name in ("nvlink-one-shot", "nvlink"))
    assert (
        f"({of_one_shot:.0f} us at 70B over `nvlink`; NCCL: {of_nccl:.0f}), ladder gains {ladder[0]} % instead of "
        f"{ladder[1]} %, and no wiring more than {bound[0]} %" in pages["docs/plan.md"]
    )
    assert f"ladder gains {ladder[0]} % at 70B and batch 4" in pages["docs/paper.md"]
    assert 3.5 < of_nccl / of_one_shot < 4.5 and "64 KB in a quarter of NCCL's time" in read_page("docs/benchmark.md")


def test_differences_over_sizes_are_those_of_the_runs() -> None:
    runs = json.loads((ROOT / "docs" / "study" / "sizes.json").read_text(encoding="utf-8"))
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        if run["kind"] == "tokens":
            losses.setdefault((run["size"], run["wiring"]), {})[run["seed"]] = run["loss"]
    sizes = dict.fromkeys(size for size, _ in losses)
    rows = table("docs/studies.md", "## Over sizes")
    assert len(rows) == 3 and len(sizes) == 4
    for wiring, *cells, _ in rows:
        gaps = [paired(losses[size, wiring], losses[size, "standard"]) for size in sizes]
        assert cells == [with_interval(gap["mean"], gap) for gap in gaps]


def test_prices_of_late_mixers_are_those_of_the_runs() -> None:
    study = json.loads((ROOT / "docs" / "study" / "hybrids.json").read_text(encoding="utf-8"))
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for run in study["runs"]:
        losses.setdefault((run["size"], run["wiring"]), {})[run["seed"]] = run["loss"]

    def cell(differences: dict[int, float]) -> str:
        found = paired(differences, dict.fromkeys(differences, 0.0))
        return f"{number(found['mean'], '+.4f')} ± {number((found['high'] - found['low']) / 2, '.4f')}"

    rows = table("docs/studies.md", "## Hybrids")
    kinds = {"ladder": None, "late-linear-attention": "gated DeltaNet", "late-softmax-attention": "attention"}
    assert [row[0] for row in rows] == [*kinds]
    for wiring, count, *cells in rows:
        expected = []
        for size in ("study-hybrid-smaller", "study-hybrid"):
            standard = losses[size, "standard"]
            gaps = {seed: loss - standard[seed] for seed, loss in losses[size, wiring].items()}
            total = paired(losses[size, wiring], standard)
            assert len(gaps) == 3
            expected += [
                with_interval(total["mean"], total),
                cell({seed: gap / int(count) for seed, gap in gaps.items()}),
            ]
        prices = {}
        for measured in study["rewired"]:
            of_kind = [one for one in measured["sub_blocks"] if one["kind"] == kinds[wiring]]
            assert int(count) == len((of_kind or [measured])[0]["layers"])
            together = of_kind[0]["together"] if of_kind else measured["upper"][-1]
            prices[measured["seed"]] = together[0] / int(count)
        assert cells == [*expected, cell(prices)]
