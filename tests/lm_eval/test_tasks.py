"""The model of lm-eval under the real lm-eval, on local tasks. `tests/lm_eval.sh` installs it first.

The scores of two ranks are compared with those of lm-eval's own model `hf` on the exported directory.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.cli.convert_checkpoint import main as convert
from megatron_ladder.errors import UserError
from megatron_ladder.lm_eval import LadderLM
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.helpers.commands import REPOSITORY_ROOT, run_command
from tests.helpers.tokenizer_copies import copy_tokenizer
from tests.unit.generate.tiny_model import tiny_config, write_checkpoint

WIRINGS: dict[str, dict[str, Any]] = {
    "ladder": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2)},
    "hybrid": {"residual_mode": "ladder", "ladder_layers": (1,), "qk_layernorm": True},
    "desync-2x": {"residual_mode": "desync", "desync_interval": 2, "desync_tp": 2},
}
IMPORTED = {"hugging_face": {"model_type": "llama", "eos_token_id": 1}}
"""Header of the hybrid's checkpoint, with which texts begin with a special token. The others were trained without."""
CONTROL = [f"<{number}>" for number in range(80)]
TEXT = "The quick brown fox jumps over the lazy dog. A model reads a text, and predicts what follows it.\n"
CHOICES = [
    {"question": "The quick brown", "choices": ["fox", "dog jumps", " lazy text model"], "answer": 0},
    {"question": "A model ", "choices": ["reads", "jumps over the dog", "?"], "answer": 1},
    {"question": "", "choices": ["what follows", "it."], "answer": 1},
    {"question": TEXT * 4, "choices": ["a text", "dog", "fox fox"], "answer": 2},
    {"question": "reads a", "choices": ["text,", "A"], "answer": 0},
]
"""The fourth question is longer than the model's positions."""
TASKS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "choices": (
        CHOICES,
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    ),
    "last_word": (
        [{"text": "The quick brown", "word": "fox"}, {"text": "over the lazy", "word": "dog"}],
        'output_type: loglikelihood\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{word}}"\n'
        "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    ),
    "documents": (
        [{"text": TEXT}, {"text": TEXT * 5}, {"text": "dog"}],
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    ),
    "answers": (
        [{"text": "The quick", "answer": "a"}, {"text": "A model reads a text,", "answer": "b"}, {"text": TEXT * 4}],
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["q", "\\n"], max_gen_toks: 9}\nmetric_list: [{metric: exact_match}]\n',
    ),
    "ends": (
        [{"text": text} for text in ("The", "quick", "brown fox", "A model reads", "a text,", TEXT * 4)],
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
        f"generation_kwargs: {{until: {json.dumps(CONTROL[::2])}, max_gen_toks: 30}}\n"
        "metric_list: [{metric: exact_match}]\n",
    ),
}
"""The answers of the last one end at control tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint and an export of each wiring, and the tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    for name in WIRINGS:
        tokenizer = write_tokenizer(folder / f"{name}-tokenizer", strips=name == "hybrid")
        config = config_of(name, tokenizer)
        checkpoint = write_checkpoint(folder / name, config, **(IMPORTED if name == "hybrid" else {}))
        copy_tokenizer(tokenizer, checkpoint)
        convert(["export", "--load", str(folder / name), "--hf", str(folder / f"{name}-hf")])
    (folder / "tasks").mkdir()
    for name, (documents, content) in TASKS.items():
        data = folder / "tasks" / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"answer": "none", **document}) + "\n" for document in documents))
        options = f"{{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}"
        source = f"dataset_path: json\ndataset_kwargs: {options}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{source}{content}")
    return folder


def write_tokenizer(path: Path, strips: bool) -> HuggingFaceTokenizer:
    """Write a tokenizer that puts a special token before every text; `strips` as Llama 2 does the first blank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if strips else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Metaspace() if strips else decoders.ByteLevel()
    alphabet = ["?"] if strips else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>", *CONTROL], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return HuggingFaceTokenizer(path)


def config_of(name: str, tokenizer: HuggingFaceTokenizer) -> ModelConfig:
    return tiny_config(**WIRINGS[name], vocab_size=tokenizer.vocab_size)


def evaluate(folder: Path, model: Any, tasks: Sequence[str] = tuple(TASKS), **more: Any) -> Mapping[str, Any]:
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    results = simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **more)
    assert results is not None
    return results


def evaluate_export(
    folder: Path, name: str, tasks: Sequence[str] = tuple(TASKS), batch_size: int = 2
) -> Mapping[str, Any]:
    exported = {"pretrained": str(folder / f"{name}-hf"), "trust_remote_code": True, "dtype": "float32"}
    return evaluate(folder, "hf", tasks, model_args=exported, device="cpu", batch_size=batch_size)


def assert_equal_results(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert equal metrics and equal answers of the model to every request."""
    for task, metrics in expected["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers and {name: found["results"][task][name] for name in numbers} == pytest.approx(numbers, rel=1e-4)
    for task in expected["samples"]:
        own, others = (answers(one, task) for one in (found, expected))
        if task in ("answers", "ends"):
            assert own == others and any(others)
        else:
            assert own == pytest.approx(others, rel=1e-6, abs=1e-4), task


def answers(results: Mapping[str, Any], task: str) -> list[Any]:
    """Return everything that the model answered about the documents of a task, as numbers or texts."""
    samples = {sample["doc_id"]: json.loads(json.dumps(sample["resps"])) for sample in results["samples"][task]}
    return flat([samples[number] for number in sorted(samples)])


def flat(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in flat(one)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", WIRINGS)
def test_two_ranks_equal_the_export(folder: Path, name: str) -> None:
    model = LadderLM(model=folder / name, tp=2, batch_size=3)
    found, ends = evaluate(folder, model, list(TASKS)[:-1]), evaluate(folder, model, ["ends"])
    model._evaluator.close()
    assert_equal_results(found, evaluate_export(folder, name, list(TASKS)[:-1]))
    # In a batch, `hf` continues texts that have ended.
    assert_equal_results(ends, evaluate_export(folder, name, ["ends"], batch_size=1))
    answered = [len(text) for text in answers(ends, "ends")]
    assert max(answered) > min(answered)


def run_command_line(
    folder: Path, arguments: str, *more: str, launcher: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, *launcher, "-m", "megatron_ladder.lm_eval", "--model", "megatron_ladder"]
    words += ["--model_args", arguments, "--tasks", "choices", "--include_path", str(folder / "tasks"), *more]
    return run_command(words, 300, {"PYTHONPATH": str(REPOSITORY_ROOT), "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_the_command_line_writes_results(folder: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    arguments = f"model={folder / 'hybrid'}" + ("" if launcher else ",tp=2")
    done = run_command_line(folder, arguments, "--output_path", str(tmp_path), launcher=launcher)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("results_*.json")
    expected = evaluate_export(folder, "hybrid", ["choices"])["results"]["choices"]
    found = json.loads(file.read_text())["results"]["choices"]
    assert (found["acc,none"], found["acc_norm,none"]) == (expected["acc,none"], expected["acc_norm,none"])


def test_mistakes_are_reported_without_a_traceback(folder: Path) -> None:
    done = run_command_line(folder, f"model={folder / 'hybrid'},tp=3,tpp=1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --model_args: --tpp is not a flag of this program")


def test_conversations_and_generation_settings(folder: Path) -> None:
    model = LadderLM(model=folder / "hybrid-hf")
    with pytest.raises(UserError, match="--apply_chat_template: .* has no chat template"):
        model.chat_template(True)
    template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    (folder / "hybrid-hf" / "chat_template.jinja").write_text(template)
    model._evaluator.close()
    model = LadderLM(model=folder / "hybrid-hf")
    history = [{"role": "user", "content": "A text"}, {"role": "assistant", "content": "The "}]
    text = model.apply_chat_template(history[:1])
    assert text == "<s>user: A text</s><s>assistant:" and model.chat_template(True) == template
    assert model.apply_chat_template(history, add_generation_prompt=False) == "<s>user: A text</s><s>assistant: The"
    assert model.tok_encode(text).count(0) == 2 and model.tok_encode("A text")[0] == 0
    spelled = model.apply_chat_template([{"role": "user", "content": "A <s> text"}])
    assert model.tok_encode(spelled).count(0) == 2 and model.tok_encode("A <s> text").count(0) == 2
    settings = {"until": ["."], "max_gen_toks": 4, "do_sample": True, "temperature": 0.5, "top_k": 3}
    request = model._request("A text", settings, 0)
    assert (request.sampling.temperature, request.sampling.top_k, request.stop) == (0.5, 3, (".", "</s>"))
    assert model._request("A text", settings, 1).sampling.seed != request.sampling.seed
    with pytest.raises(UserError) as caught:
        model._request("A text", {"num_beams": 4, "top_p": 2.0, "do_sample": True, "temperature": 1.0}, 0)
    assert [message.partition(": ")[2][:25] for message in caught.value.messages] == [
        "num_beams is not supporte",
        "--top-p 2.0: expected abo",
    ]
    with pytest.raises(UserError, match="max_gen_toks=96: expected 1 to 95"):
        model._request("A text", {"max_gen_toks": 96}, 0)
    with pytest.raises(UserError, match="--batch_size auto: this model has no automatic batch size"):
        LadderLM(model=folder / "hybrid", batch_size="auto")
