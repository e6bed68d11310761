"""Odd Hugging Face directories, opened by every program that reads one: all give the same refusal or the same numbers.

The numbers are those of transformers, of the same directory. Each program gives a part of the logits of `ROWS`.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ladder.checkpoint.hf_types import OWN_TYPE
from megatron_ladder.cli.generate import main as generate
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import parse_run
from megatron_ladder.convert.inspection import inspect_directory
from megatron_ladder.errors import UserError
from megatron_ladder.generate.evaluation import Evaluator
from megatron_ladder.generate.loading import load_model, open_model
from megatron_ladder.train.distillation import build_distillation
from megatron_ladder.train.inputs import read_inputs
from tests.helpers.fp8 import PUBLISHED
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.helpers.tokens import write_documents
from tests.unit.convert.saved_models import convert, export, our_logits, save_model, small_config
from tests.unit.convert.test_fp8 import save_fp8

LENGTH, VOCAB = 12, 301
ROWS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(4))
_DATA = [*ROWS.flatten().tolist(), 5]


def imported(directory: Path, folder: Path) -> Tensor:
    convert("import", "--hf", directory, "--save", folder / "imported", "--verify")
    return our_logits(folder / "imported", ROWS)


def generated(directory: Path, _: Path) -> Tensor:
    """Return the token that follows each row."""
    tokens = [word for row in ROWS.tolist() for word in ("--tokens", " ".join(map(str, row)))]
    output = io.StringIO()
    with redirect_stdout(output):
        generate(["--model", str(directory), *tokens[:2], "--max-new-tokens", "1", "--temperature", "0", "--json"])
    return torch.tensor(json.loads(output.getvalue().splitlines()[-1])["ids"])


def evaluated(directory: Path, _: Path) -> Tensor:
    """Return the log-likelihood of the second half of each row."""
    with closing(Evaluator(2, model=directory)) as evaluator:
        texts = [(tuple(row[: LENGTH // 2]), tuple(row[LENGTH // 2 :])) for row in ROWS.tolist()]
        return torch.tensor([score.logprob for score in evaluator.score(texts)])


def measured(directory: Path, folder: Path) -> Tensor:
    """Return the loss, which sensitivity reports of the model as it is."""
    write_documents(folder / "data", _DATA)
    words = ["--load", directory, "--data", folder / "data", "--output", folder / "out.json", "--greedy-layers", 1]
    with redirect_stdout(io.StringIO()):
        convert("sensitivity", *words, "--seq-length", LENGTH, "--tokens", 2 * LENGTH)
    return torch.tensor(json.loads((folder / "out.json").read_text())["loss"])


def taught(directory: Path, folder: Path) -> Tensor:
    """Return the logits of a teacher."""
    data = write_documents(folder / "tokens", _DATA)
    sizes = f"--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length {LENGTH} --vocab-size {VOCAB}"
    words = f"{sizes} --train-iters 1 --lr 1e-3 --eval-iters 0 --split 1 --data-path {data} --distill-from {directory}"
    inputs = read_inputs(parse_run(words.split()), RankInfo(0, 1, 0))
    assert inputs.teacher is not None
    teacher = build_distillation(inputs.run, inputs.teacher, ProcessMesh.single(), torch.device("cpu")).teacher
    hidden_states = teacher.hidden_states(ROWS, teacher.training_context(ROWS))
    return teacher.logits_shard(hidden_states)[..., :VOCAB].transpose(0, 1)


def inspected(directory: Path, _: Path) -> Tensor:
    assert [*inspect_directory(directory)]
    return torch.zeros(0)


def _likelihoods(logits: Tensor) -> Tensor:
    labels = ROWS[:, LENGTH // 2 :, None]
    return logits[:, LENGTH // 2 - 1 : -1].log_softmax(-1).gather(2, labels).sum((1, 2))


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.tensor(_DATA[1:]))


DOORS: dict[str, tuple[Callable[[Path, Path], Tensor], Callable[[Tensor], Tensor]]] = {
    "import": (imported, lambda logits: logits),
    "generate": (generated, lambda logits: logits[0, -1:].argmax(-1)),
    "lm-eval": (evaluated, _likelihoods),
    "sensitivity": (measured, _loss),
    "teacher": (taught, lambda logits: logits),
    "inspect": (inspected, lambda logits: logits[:0, 0, 0]),
}
"""Name -> the program, and what it makes of logits [rows, tokens, V]."""


@dataclass(frozen=True)
class Odd:
    """A directory that transformers saved, and what is changed in it."""

    words: tuple[str, ...] = ()
    """Parts of the refusal; none for a directory that opens."""
    kind: str = "llama"
    build: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `save_model`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changed keys of config.json; those that are `...` are removed."""
    weights: Callable[[dict[str, Tensor]], object] | None = None
    """Changes the tensors."""
    files: Callable[[Path], object] | None = None
    """Changes other files."""


def refused(*words: str, **more: Any) -> Odd:
    return Odd(words, **more)


Q, HEAD, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_ROPE = {"rope_parameters": ..., "rope_theta": 500.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def cast(dtype: torch.dtype, suffix: str = "") -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update(
        {name: tensor.to(dtype) for name, tensor in tensors.items() if name.endswith(suffix)}
    )


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def written(name: str, content: bytes | object) -> Callable[[Path], object]:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda directory: (directory / name).write_bytes(data)


def cut(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-1])


def as_pickle(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


def sharded(
    change: Callable[[dict[str, str]], object] = lambda index: None, both: tuple[str, ...] = ()
) -> Callable[[Path], object]:
    """Divide the weights into two files, change the index, and store some tensors in both."""

    def divide(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        index = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(sorted(tensors))}
        for file in ("a.safetensors", "b.safetensors"):
            save_file(
                {name: tensors[name] for name in tensors if index[name] == file or name in both}, directory / file
            )
        shutil.copy(directory / "a.safetensors", directory.parent / "x.safetensors")
        (directory / WEIGHTS).unlink()
        change(index)
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return divide


ODD: dict[str, Odd] = {
    # Heads.
    "tied, with another head": refused("lm_head.weight differs from", config={"tie_word_embeddings": True}),
    "tied, with an equal head": Odd(
        config={"tie_word_embeddings": True}, weights=lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()})
    ),
    "tied, with a head of another element type": refused(
        "lm_head.weight differs from",
        config={"tie_word_embeddings": True},
        weights=lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].bfloat16()}),
    ),
    "tied, without a head": Odd(config={"tie_word_embeddings": True}, weights=lambda tensors: tensors.pop(HEAD)),
    "untied, without a head": refused("lm_head.weight: is missing", weights=lambda tensors: tensors.pop(HEAD)),
    # Tensors.
    "a missing tensor": refused(f"{Q}: is missing", weights=lambda tensors: tensors.pop(Q)),
    "a further tensor": refused(
        f"{Q}s: unexpected tensor", weights=lambda tensors: tensors.update({f"{Q}s": torch.ones(2)})
    ),
    "a tensor of another shape": refused(f"{Q}: found shape [47, 48]", weights=changed(Q, lambda x: x[1:].clone())),
    "a transposed tensor": refused(
        "found shape [48, 24]", weights=changed(Q.replace("q_p", "k_p"), lambda x: x.T.contiguous())
    ),
    "another quantisation": refused(
        "quantization_config.quant_method: found 'awq', expected 'fp8'",
        config={"quantization_config": {"quant_method": "awq"}},
    ),
    "FP8 without scales": refused(
        f"{Q}_scale_inv: is missing",
        config={"quantization_config": PUBLISHED},
        weights=cast(torch.float8_e4m3fn, "_proj.weight"),
    ),
    "scales without FP8": refused(
        f"{Q}_scale_inv: scales FP8 weights, but {Q} is float32",
        config={"quantization_config": PUBLISHED},
        weights=lambda tensors: tensors.update({f"{Q}_scale_inv": torch.ones(1, 1)}),
    ),
    "a tensor of integers": refused("found int8", weights=changed(Q, lambda x: x.to(torch.int8))),
    "float64": refused("found float64", weights=cast(torch.float64)),
    "float16": Odd(weights=cast(torch.float16)),
    "bfloat16": Odd(weights=cast(torch.bfloat16)),
    "norms in float32": Odd(weights=cast(torch.bfloat16, "_proj.weight")),
    "stored frequencies": Odd(
        weights=lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    ),
    "a padded vocabulary": refused(
        "found shape [304, 48], expected [301, 48]", weights=changed(EMBEDDING, lambda x: F.pad(x, (0, 0, 0, 3)))
    ),
    "fewer layers than tensors": refused(
        "model.layers.3.input_layernorm.weight: unexpected", config={"num_hidden_layers": 3}
    ),
    "more layers than tensors": refused(
        "model.layers.4.self_attn.q_proj.weight: is missing", config={"num_hidden_layers": 5}
    ),
    # Files.
    "shards": Odd(files=sharded()),
    "a file outside": refused(
        "'../x.safetensors' is", files=sharded(lambda index: index.update({Q: "../x.safetensors"}))
    ),
    "a missing file": refused(
        "c.safetensors: no such file", files=sharded(lambda index: index.update(c="c.safetensors"))
    ),
    "a tensor in two files, listed in the first": refused(f"{EMBEDDING}: is in", files=sharded(both=(EMBEDDING,))),
    "a tensor in two files, listed in the second": refused(f"{HEAD}: is in", files=sharded(both=(HEAD,))),
    "an index without a map": refused(
        "weight_map is not", files=lambda path: (sharded()(path), written(INDEX, {})(path))
    ),
    "weights and an index": refused("has both of", files=written(INDEX, {"weight_map": {}})),
    "a truncated file": refused("not a complete safetensors file: truncated", files=cut),
    "an empty file": refused("not a complete safetensors file", files=written(WEIGHTS, b"")),
    "pickles": refused("save the weights as safetensors", files=as_pickle),
    "a pointer instead of weights": refused("in Git LFS", files=written(WEIGHTS, POINTER)),
    "a pointer instead of config.json": refused("in Git LFS", files=written("config.json", POINTER)),
    "a pointer instead of a tokenizer": refused("in Git LFS", files=written("tokenizer.json", POINTER)),
    "a pointer instead of settings": refused("in Git LFS", files=written("generation_config.json", POINTER)),
    "a tokenizer that is none": refused("tokenizer.json: is not JSON", files=written("tokenizer.json", b"{")),
    "a list as config.json": refused("config.json: found [1], expected an object", files=written("config.json", [1])),
    "an end of text that is no token": refused("eos_token_id: found 301", config={"eos_token_id": 301}),
    "settings with an end that is no token": refused(
        "found [2, 999]", files=written("generation_config.json", {"eos_token_id": [2, 999]})
    ),
    # Rotary embeddings.
    "theta alone": Odd(config=OLD_ROPE),
    "scaling by a factor": Odd(config=OLD_ROPE | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "the scaling of Llama 3": Odd(config=OLD_ROPE | {"rope_scaling": LLAMA3}),
    "YaRN": Odd(config=OLD_ROPE | {"rope_scaling": YARN}),
    "YaRN between fractional indices": Odd(config=OLD_ROPE | {"rope_scaling": YARN | {"truncate": False}}),
    "YaRN, in the new spelling": Odd(config={"rope_parameters": YARN | {"rope_theta": 500.0}}),
    "no theta": Odd(config={"rope_parameters": ...}),
    "two thetas": refused("expected one rope_theta", config={"rope_theta": 500.0}),
    "dynamic scaling": refused(
        "rope_scaling.rope_type: found 'dynamic'",
        config=OLD_ROPE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "longrope": refused("found 'longrope'", config={"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}),
    "part of each head": refused("partial_rotary_factor: found 0.5", config={"partial_rotary_factor": 0.5}),
    # Attention and MLP.
    "biases": Odd(build={"attention_bias": True, "mlp_bias": True}),
    "biases without tensors": refused("q_proj.bias: is missing", config={"attention_bias": True}),
    "unlisted biases": refused(
        "q_proj.bias: unexpected", build={"attention_bias": True}, config={"attention_bias": False}
    ),
    "narrow heads": Odd(build={"head_dim": 6}),
    "as many key-value heads, by default": Odd(build={"num_key_value_heads": 4}, config={"num_key_value_heads": ...}),
    "three key-value heads": refused("is not divisible by num_key_value_heads 3", config={"num_key_value_heads": 3}),
    "other activation": refused("hidden_act: found 'gelu'", config={"hidden_act": "gelu"}),
    "a window": Odd(kind="mistral", config={"sliding_window": 8}),
    "no window, by default one": Odd(kind="mistral", config={"sliding_window": ...}),
    "an unused window": Odd(
        kind="qwen2", config={"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}
    ),
    "a used window": Odd(
        kind="qwen2",
        config={"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ...},
    ),
    "kinds of layers": refused(
        "use_sliding_window: found False",
        kind="qwen3",
        config={"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
    ),
    "norms of heads": Odd(kind="qwen3"),
    "experts": Odd(kind="qwen3_moe"),
    "predicting layers": Odd(
        kind="deepseek_v3",
        config={"num_nextn_predict_layers": 2},
        weights=lambda tensors: tensors.update({"model.layers.5.eh_proj.weight": torch.ones(2, 4)}),
    ),
    "Mixtral": Odd(kind="mixtral"),
    # Exported models.
    "late layers": Odd(kind=OWN_TYPE),
    "the number of late layers": Odd(kind=OWN_TYPE, config={"ladder_layers": 2}),
    "late layers in another order": Odd(kind=OWN_TYPE, config={"ladder_layers": [3, 1]}),
    "no late layers": Odd(kind=OWN_TYPE, config={"ladder_layers": ...}),
    "two sub-blocks late": Odd(kind=OWN_TYPE, config={"residual_staleness": 2}),
    "two lanes": Odd(kind=OWN_TYPE, config={"lanes": 2}),
    "clipped activations": Odd(kind=OWN_TYPE, config={"swiglu_limit": 0.5, "glu_linear_offset": 1.0}),
    "soft-capped logits": Odd(kind=OWN_TYPE, config={"final_logit_softcapping": 30.0}),
    "a late layer that does not exist": refused(
        "ladder_layers: found [1, 9], expected at most the 4 layers", kind=OWN_TYPE, config={"ladder_layers": [1, 9]}
    ),
    "late layers by a switch": refused("ladder_layers: found True", kind=OWN_TYPE, config={"ladder_layers": True}),
    "late layers that are not late": refused(
        "found [1, 3], expected none with", kind=OWN_TYPE, config={"residual_mode": "standard"}
    ),
    "another wiring": refused("residual_mode: found 'odd'", kind=OWN_TYPE, config={"residual_mode": "odd"}),
    "not late": refused("residual_staleness: found 0", kind=OWN_TYPE, config={"residual_staleness": 0}),
    "lanes that do not divide heads": refused("lanes 3", kind=OWN_TYPE, config={"lanes": 3}),
    "desync without its wiring": refused("desync_tp: found 2", kind=OWN_TYPE, config={"desync_tp": 2}),
    "farskip without experts": refused(
        "residual_mode farskip needs layers with experts", kind=OWN_TYPE, config={"residual_mode": "farskip"}
    ),
    "latent attention without sizes": refused(
        *("found nothing, expected a value, as in all models with kv_lora_rank", "qk_nope_head_dim"),
        kind=OWN_TYPE,
        config={"kv_lora_rank": 4},
    ),
    "an exported model as a Llama": refused(
        "auto_map names custom code", kind=OWN_TYPE, config={"model_type": "llama"}
    ),
    # Keys and types.
    "no norm_eps": refused("rms_norm_eps: found nothing, expected a number", config={"rms_norm_eps": ...}),
    "no type": refused("model_type: found nothing, expected one of llama", config={"model_type": ...}),
    "an unknown type": refused("model_type: found 'odd', expected one of llama", config={"model_type": "odd"}),
    "late layers in a Llama": refused("ladder_layers: found [1]", config={"ladder_layers": [1]}),
    "a text as a number": refused("vocab_size: found '301'", config={"vocab_size": "301"}),
    "code for a plain architecture": Odd(config={"auto_map": {"AutoModel": "odd.Model"}}),
    "code for another architecture": refused(
        "auto_map names custom code", config={"auto_map": {"AutoModel": "odd.Model"}, "architectures": ["Odd"]}
    ),
    "a classifier": refused(
        "lm_head.weight: is missing",
        config={"architectures": ["LlamaForSequenceClassification"]},
        weights=lambda tensors: tensors.update({"score.weight": tensors.pop(HEAD)[:2].clone()}),
    ),
}


def write_tokenizer(directory: Path) -> None:
    words = {f"w{number}": number for number in range(VOCAB - 1)} | {"</s>": VOCAB - 1}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


def write(directory: Path, odd: Odd) -> None:
    if odd.kind == OWN_TYPE:
        config = small_config(num_layers=4, vocab_size=VOCAB, residual_mode="ladder", ladder_layers=(1, 3))
        shutil.move(export(directory.parent / "exported", config)[0], directory)
    else:
        save_model(directory, odd.kind, **odd.build)
    write_tokenizer(directory)
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **odd.config}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    if odd.weights is not None:
        tensors = load_file(directory / WEIGHTS)
        odd.weights(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    if odd.files is not None:
        odd.files(directory)


def answer(name: str, directory: Path, folder: Path) -> Tensor | list[str]:
    """Return the numbers of a program, or its errors without the flag before them."""
    folder.mkdir()
    try:
        return DOORS[name][0](directory, folder)
    except UserError as error:
        return [re.sub(r"^--[a-z-]+ ", "", message) for message in error.messages]


@pytest.mark.parametrize("name", quick_share(ODD, 6))
def test_every_program_gives_one_answer(tmp_path: Path, name: str) -> None:
    odd, directory = ODD[name], tmp_path / "hf"
    write(directory, odd)
    answers = {door: answer(door, directory, tmp_path / door) for door in DOORS}
    if odd.words:
        refusal = answers["import"]
        assert isinstance(refusal, list) and all(words in "\n".join(refusal) for words in odd.words), refusal
        assert {door: found for door, found in answers.items() if found != refusal} == {}
        return
    if odd.kind == OWN_TYPE:
        # The loss without late layers.
        del answers["sensitivity"]
    assert_answers(answers, directory, trust_remote_code=odd.kind == OWN_TYPE)


def assert_answers(answers: Mapping[str, Tensor | list[str]], directory: Path, trust_remote_code: bool = False) -> None:
    """Assert that the numbers of all programs are those of transformers."""
    settings = {"dtype": torch.float32, "experts_implementation": "eager"}
    module = AutoModelForCausalLM.from_pretrained(directory, **settings, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        logits = module.eval()(ROWS).logits
    for door, found in answers.items():
        assert isinstance(found, Tensor), (door, found)
        expected = DOORS[door][1](logits)
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-4, msg=door)


@pytest.mark.parametrize("name", ["deepseek_v3, incomplete blocks", "qwen3_moe"])
def test_every_program_dequantises(tmp_path: Path, name: str) -> None:
    """transformers computes with weights that plain arithmetic has dequantised."""
    directory, plain = tmp_path / "hf", tmp_path / "plain"
    _, weights = save_fp8(directory, name)
    write_tokenizer(directory)
    shutil.copytree(directory, plain)
    save_file(weights, plain / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    assert_answers({door: answer(door, directory, tmp_path / door) for door in DOORS}, plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_every_program_refuses_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """Inspection reads no weights. No row has the last token, so that logits of an infinite head would be finite."""
    write(tmp_path / "hf", Odd(weights=lambda tensors: tensors[EMBEDDING][-1].fill_(value)))
    answers = {door: answer(door, tmp_path / "hf", tmp_path / door) for door in DOORS if door != "inspect"}
    refusal = f"{tmp_path}/hf: {EMBEDDING}: contains NaN or infinity"
    assert {door: found for door, found in answers.items() if found != [refusal]} == {}


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Odd(weights=lambda tensors: tensors[Q][-1].fill_(1e5)))
    stored = open_model(tmp_path, None, None)
    (error,) = errors_of(load_model, stored, ProcessMesh.single(), torch.float16, torch.device("cpu"), overlap=True)
    assert error == f"{tmp_path}: {Q}: has values that do not fit in float16: use a wider type"


def test_a_directory_that_transformers_does_not_open_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "hf", Odd(config={"tie_word_embeddings": None}))
    imported(tmp_path / "hf", tmp_path)
    assert f"logits were not compared: transformers does not open {tmp_path}/hf (" in capsys.readouterr().out
