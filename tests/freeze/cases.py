"""The cases: what is run, and what of its results is recorded.

Each function runs a case and returns two objects: results that are equal on every machine, and floats, whose last bits
depend on the processor.
"""

import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import safe_open, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.freeze.inputs import TABLES, make_inputs
from tests.freeze.processes import Place

PROMPTS = ("The river", "Forty two quiet birds, \u00e9t\u00e9 and 12345 stones")
CONVERT = "tools/convert_checkpoint.py"
Results = tuple[dict[str, Any], dict[str, Any]]


def digest(value: Any) -> str:
    """Return a short hash of bytes or JSON values."""
    content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def stored_tensors(folder: Path, files: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """Return the tensors of safetensors files by their keys."""
    tensors = {}
    for path in sorted(folder.glob(files)):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in sorted(file.keys())}
    return tensors


def checkpoint_tensors(checkpoint: Path, files: str) -> dict[str, torch.Tensor]:
    """Return whole tensors of a training checkpoint, whose files hold boxes called `KIND:NAME@OFFSET,OFFSET`."""
    boxes = defaultdict(list)
    for key, box in stored_tensors(checkpoint, files).items():
        name, _, offsets = key.partition("@")
        boxes[name].append(([int(offset) for offset in offsets.split(",") if offset], box))
    tensors = {}
    for name, parts in boxes.items():
        ends = [[start + size for start, size in zip(offset, box.shape, strict=True)] for offset, box in parts]
        whole = tensors[name] = torch.zeros([max(sizes) for sizes in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
        for (offset, box), end in zip(parts, ends, strict=True):
            whole[tuple(map(slice, offset, end))] = box
    return tensors


def described(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return dtype, shape and the hash of the bytes of each tensor by name."""
    hashes = {name: digest(tensor.contiguous().view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}
    return {
        name: f"{tensors[name].dtype} {list(tensors[name].shape)} {hashes[name][:10]}"[6:] for name in sorted(tensors)
    }


def json_files(folder: Path) -> dict[str, Any]:
    """Return the parsed JSON files of a directory, and hashes of the large ones."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: value if len(json.dumps(value)) < 1500 else digest(value) for name, value in found.items()}


def flags(words: str) -> list[str]:
    """`tp=2 bf16` -> words of a command line; a later value replaces an earlier one, and `no` removes the flag."""
    values = dict(word.partition("=")[::2] for word in words.split())
    chosen = {TABLES["abbreviations"].get(name, name): value for name, value in values.items() if value != "no"}
    split = {name: value.split(",") if name.endswith("-path") else value.split() for name, value in chosen.items()}
    return [word for name, value in split.items() for word in (f"--{name}", *value)]


def train(place: Place, words: str, spy: bool = False) -> Path:
    """Train once, or again after each `then`; return the last checkpoint, next to which are the curves."""
    ranks, _, given = words.partition(" ")
    save = place.folder / "save"
    for phase, part in enumerate(given.split(" then ")):
        given = f"{given} {part} load={save}" if phase else part
        save = place.folder / f"save_{phase}"
        argv = flags(f"{given} save={save} tensorboard-dir={save}")
        place.run("pretrain_ladder.py", argv, int(ranks), spy)
    return save / (save / "latest").read_text().strip()


def training(place: Place, words: str) -> Results:
    """Losses, norms and rates of all steps, and the final weights and moments."""
    checkpoint = train(place, words)
    curves = EventAccumulator(str(checkpoint.parent)).Reload()
    tags = [tag for tag in curves.Tags()["scalars"] if tag.startswith(("train/", "valid/"))]
    # Nine digits are a whole float32.
    floats = {tag: [f"{event.value:.9g}" for event in curves.Scalars(tag)] for tag in tags}
    weights, moments = (described(checkpoint_tensors(checkpoint, f"{kind}_*")) for kind in ("weights", "optimizer"))
    names = digest([text.rpartition(" ")[0] for text in (weights | moments).values()])
    return {"tensors": names}, {**floats, "weights": digest(weights), "moments": digest(moments)}


def order(place: Place, words: str) -> Results:
    """The token ids of each micro-batch on each data-parallel rank, as the embedding receives them."""
    train(place, words, spy=True)
    seen = {path.name: path.read_text().split() for path in sorted(place.folder.glob("rank_*.tokens"))}
    return {name: f"{len(hashes)} calls: {digest(hashes)}" for name, hashes in seen.items()}, {}


def export(place: Place, words: str) -> Results:
    """A directory that is exported, filled with numbers that no processor rounds, imported and exported again."""
    trained, imported, exported = words.split("|")
    folder, checkpoint = place.folder, train(place, trained)
    place.run(CONVERT, ["reshape", "--load", checkpoint, "--save", folder / "reshaped", *flags(imported)])
    place.run(CONVERT, ["export", "--load", checkpoint, "--hf", folder / "hf", *flags(exported)])
    numbers = np.random.default_rng(1)
    for path in sorted((folder / "hf").glob("*.safetensors")):
        tensors = stored_tensors(folder / "hf", path.name)
        for tensor in tensors.values():
            tensor.copy_(
                torch.from_numpy(numbers.integers(-127, 128, tensor.shape) / (256 if tensor.dim() > 1 else 64))
            )
        save_file(tensors, path, {"format": "pt"})
    place.run(CONVERT, ["import", "--hf", folder / "hf", "--save", folder / "back", *flags(imported)])
    place.run(CONVERT, ["export", "--load", folder / "back", "--hf", folder / "again", *flags(exported)])
    (back,), (reshaped,) = ((folder / name).glob("iter_*") for name in ("back", "reshaped"))
    exact = {
        "first json": digest(json_files(folder / "hf")),
        "checkpoint": digest(described(checkpoint_tensors(back, "weights_*"))),
        "files": sorted(path.name for path in (folder / "again").iterdir()),
        "json": json_files(folder / "again"),
        "tensors": described(stored_tensors(folder / "again")),
    }
    kinds = [described(checkpoint_tensors(reshaped, f"{kind}_*")) for kind in ("weights", "optimizer")]
    return exact, {"reshaped": digest(kinds)}


def generate(place: Place, words: str) -> Results:
    """The ids that continue two prompts, or the scores of the prompts."""
    ranks, *argv = words.split()
    lengths = [] if "--score" in argv else ["--max-new-tokens", "64", "--ignore-eos"]
    output = place.run(
        "tools/generate.py", [*argv, *lengths, "--tp", ranks, "--json", "--prompt", *PROMPTS], int(ranks)
    )
    lines = [json.loads(line) for line in output.splitlines()]
    return ({}, {"scores": lines}) if "--score" in argv else ({"ids": [line["ids"] for line in lines]}, {})


def data(place: Place, words: str) -> Results:
    """The bytes of all files of a data set, and its description; without words, the tokenizers."""
    if words:
        place.run("tools/preprocess_data.py", [*words.split(), "--output-prefix", place.folder / "out"])
    else:
        make_inputs(place.folder)
        for name, kind, size in (("bpe", "bpe", 600), ("sp", "sentencepiece", 700)):
            argv = f"--input {place.folder}/corpus.jsonl --model-type {kind} --vocab-size {size}".split()
            place.run("tools/train_tokenizer.py", [*argv, "--model-prefix", place.folder / name])
    paths = sorted(path for ending in ("bin", "idx", "model") for path in place.folder.glob(f"*.{ending}"))
    return {"files": {path.name: digest(path.read_bytes()) for path in paths}, "json": json_files(place.folder)}, {}


GROUPS = {group.__name__: group for group in (data, order, export, generate, training)}


def all_cases() -> dict[str, str]:
    """Return the words of all cases by GROUP/NAME."""
    cases = {}
    for group in GROUPS:
        for name, words in TABLES[group].items():
            for short, tokenizer in TABLES["tokenizers"].items():
                words = re.sub(rf"\b{short}$", tokenizer, words)
            ranks, _, own = words.partition(" ")
            cases[f"{group}/{name}"] = f"{ranks} {TABLES['common'].get(group, '')} {own}" if own else words
    return cases


def needs(words: str) -> set[str]:
    """Return the cases whose folders the words name."""
    return set(re.findall(r"{(\w+/[\w-]+)}", words))


def run_case(name: str, words: str, place: Place) -> Results:
    """Run a case; raises RuntimeError if a script fails."""
    filled = re.sub(r"{(\w+/[\w-]+)}", lambda match: str(place.scratch / match[1]), words)
    return GROUPS[name.partition("/")[0]](place, filled)
