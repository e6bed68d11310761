"""Texts end where training ended them: conversations whose turns end with another token than documents."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ladder.api import TextGenerator
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.cli.convert_checkpoint import main as convert
from megatron_ladder.cli.generate import main as generate
from megatron_ladder.cli.preprocess_data import main as preprocess
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.loader import find_chat_template
from megatron_ladder.generate.prompts import OPEN_ANSWERS
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.helpers.commands import run_command
from tests.helpers.tokenizer_copies import train_byte_level

END, TURN_END = 0, 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role[0] + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)
PROMPT = "<|im_start|>uhi<|im_end|><|im_start|>a"
RECIPE = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 48 --micro-batch-size 8 --train-iters 80 "
    "--lr 5e-3 --split 1 --eval-iters 0 --reset-attention-mask --reset-position-ids"
).split()
PROGRAM = """
import sys
from megatron_ladder.api import training

folder, prompt = sys.argv[1:]
with training(
    load=f"{folder}/chats", save=f"{folder}/texts", finetune=True, data_path=f"{folder}/t_text_document", split="1",
    tokenizer_type="HuggingFaceTokenizer", tokenizer_model=f"{folder}/tokenizer", train_iters=9, lr=1e-9,
    micro_batch_size=1, eval_iters=0,
) as run:
    ids = run.tokenizer.encode(prompt)
    print(">", run.generate([ids], 8), len(run.generate([ids], 8, stop_ids=())[0]), flush=True)
    run.save()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a model that was trained on them."""
    folder = tmp_path_factory.mktemp("endings")
    (folder / "tokenizer").mkdir()
    library = train_byte_level([], 259, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (folder / "c.jsonl").write_text((json.dumps({"messages": messages * 2}) + "\n") * 100)
    (folder / "t.jsonl").write_text((json.dumps({"text": "a document"}) + "\n") * 100)
    (folder / "prompts").write_text(PROMPT)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    for name, flag in (("c", "--chat"), ("t", "--append-eod")):
        preprocess(["--input", str(folder / f"{name}.jsonl"), "--output-prefix", str(folder / name), flag, *tokenizer])
    words = ["--data-path", folder / "c_messages_document", "--save", folder / "chats", *tokenizer]
    samples = ["--sample-prompts", folder / "prompts", "--sample-tokens", "8"]
    done = run_command([sys.executable, "pretrain_ladder.py", *RECIPE, *words, *samples], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "log").write_text(done.stdout)
    return folder


def answer(
    capsys: pytest.CaptureFixture[str], model: Path, *flags: str, prompt: tuple[str, ...] = ("--prompt", "hi", "--chat")
) -> tuple[list[int], str, str]:
    """Return the ids and the text that `generate.py` prints, and why they end."""
    generate(["--model", str(model), *prompt, "--temperature", "0", "--max-new-tokens", "8", "--json", *flags])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found["ids"], found["text"], found["finish_reason"]


def test_answers_end_with_the_token_that_ended_turns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They do in all programs, from Python, and in transformers after an export; also after training on documents."""
    ids = HuggingFaceTokenizer(folder / "tokenizer").encode("yo") + [TURN_END]
    assert f"| sample {PROMPT!r} -> 'yo'" in (folder / "log").read_text()
    assert answer(capsys, folder / "chats") == (ids, "yo", "eos")
    done = run_command([sys.executable, "-c", PROGRAM, folder, PROMPT], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"> {[ids[:-1]]} 8" in done.stdout
    for name in ("chats", "texts"):
        assert Checkpoint.open(folder / name).manifest["end_ids"] == [END, TURN_END]
        convert(["export", "--load", str(folder / name), "--hf", str(folder / f"{name}-hf")])
        assert answer(capsys, folder / f"{name}-hf") == (ids, "yo", "eos")
        assert json.loads((folder / f"{name}-hf" / "config.json").read_text())["eos_token_id"] == [END, TURN_END]
        tokenizer = AutoTokenizer.from_pretrained(folder / f"{name}-hf")
        model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf")
        prompt = tokenizer(PROMPT, return_tensors="pt")
        found = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        assert found[0, prompt["input_ids"].shape[1] :].tolist() == ids


def test_answers_end_although_a_model_does_not_record_with_what(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a base model of others, whose chat template ends turns with another token than documents."""
    convert(["export", "--load", str(folder / "chats"), "--hf", str(tmp_path / "hf")])
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "hf" / name).read_text())
        (tmp_path / "hf" / name).write_text(json.dumps({**values, "eos_token_id": END}))
    ids, text, reason = answer(capsys, tmp_path / "hf")
    assert (ids[-1], text, reason) == (TURN_END, "yo", "eos")
    (found,) = TextGenerator(tmp_path / "hf").generate("hi", chat=True, temperature=0, max_new_tokens=8)
    assert (list(found.ids), found.text) == (ids, "yo")
    prompt = ("--tokens", *map(str, HuggingFaceTokenizer(folder / "tokenizer").encode(PROMPT)))
    assert answer(capsys, tmp_path / "hf", prompt=prompt)[2] == "length"
    assert answer(capsys, tmp_path / "hf", "--stop", "<|im_end|>", prompt=prompt) == (ids, "yo", "stop")


def test_conversations_that_nothing_ends_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While preprocessing, and by generation and export of a model that was trained on them."""
    (folder / "open.jinja").write_text(TEMPLATE.replace("+ '<|im_end|>'", ""))
    words = ["--input", str(folder / "c.jsonl"), "--output-prefix", str(folder / "open"), "--chat"]
    words += ["--chat-template", str(folder / "open.jinja"), "--tokenizer-type", "HFTokenizer"]
    preprocess([*words, "--tokenizer-model", str(folder / "tokenizer")])
    printed = capsys.readouterr().out
    assert "answers do not end with a special token: pass a --chat-template" in printed
    assert "the tokenizer has <|endoftext|> <|im_start|> <|im_end|>\n" in printed
    # And by what continues such a model, or the model after more training on documents.
    tokenizer = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    words = [*RECIPE, "--train-iters", "1"]
    for name, more in (
        ("open", ["--data-path", folder / "open_messages_document", *tokenizer]),
        ("later", ["--data-path", folder / "t_text_document", "--load", folder / "open-run", "--finetune"]),
    ):
        run = folder / f"{name}-run"
        done = run_command([sys.executable, "pretrain_ladder.py", *words, *more, "--save", run], timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        capsys.readouterr()
        for flags, said in ((["--chat"], True), (["--chat", "--stop", "x"], False), ([], False)):
            generate(["--model", str(run), "--prompt", "hi", "--max-new-tokens", "2", *flags])
            lines = [line for line in capsys.readouterr().err.splitlines() if OPEN_ANSWERS in line]
            assert lines == [f"warning: {OPEN_ANSWERS} (--stop)"] * said
        convert(["export", "--load", str(run), "--hf", str(folder / f"{name}-hf")])
        assert f"*** {OPEN_ANSWERS} ***\n" in capsys.readouterr().out
    generate(["--model", str(folder / "chats"), "--prompt", "hi", "--max-new-tokens", "2", "--chat"])
    convert(["export", "--load", str(folder / "chats"), "--hf", str(folder / "ended-hf")])
    assert OPEN_ANSWERS not in "".join(capsys.readouterr())


def test_training_names_conversations_that_nothing_ends(folder: Path) -> None:
    lines = list[str]()
    datasets = [IndexedDataset(folder / f"{name}_messages_document") for name in ("open", "c")]
    assert find_chat_template(datasets[::-1], lines.append) == TEMPLATE
    assert [line for line in lines if "no token that ends answers" in line][0].startswith(f"*** {folder}/open_")
    assert len(lines) == 2
