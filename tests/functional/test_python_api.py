"""The Python interface, as examples/python_api.py uses it."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.errors import UserError
from tests.helpers.commands import REPOSITORY_ROOT, free_port, run_command
from tests.helpers.tokens import write_tokens

SCRIPT = REPOSITORY_ROOT / "examples" / "python_api.py"
PROGRAM = """
import runpy, shutil, sys
from pathlib import Path
from megatron_ladder.api import TextGenerator, open_training, training
from megatron_ladder.errors import BadNumbersError, UserError

script, corpus, folder = sys.argv[1:]
for name in folder, folder + "_again":
    sys.argv = [script, corpus, name]
    runpy.run_path(script)

def attempt(call, *values, **flags):
    try:
        print(">", call(*values, **flags))
    except (UserError, BadNumbersError, ValueError) as error:
        print(">", error)

files = {
    "tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": f"{corpus}/tokenizer.model",
    "train_data_path": f"{corpus}/train_text_document", "valid_data_path": f"held={corpus}/valid_text_document",
}
sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8, "micro_batch_size": 1}
limits = {"train_iters": 9, "lr": 1e-3, "max_consecutive_bad_steps": 2}
with training(**files, **sizes, **limits) as run:
    attempt(run.save)
    attempt(run.evaluate)
    attempt(run.score, ((text, [1]) for text in ["ab"]))
    attempt(run.generate, [[1]], 9)
    next(run.model.parameters()).data.fill_(float("nan"))
    attempt(run.score, [([1], [2])])
    print(">", run.step().skipped)
    attempt(run.step)
for layout in {}, {"offload_optimizer": "cpu"}, {"zero_stage": 3}:
    place = folder + "_".join(["", "bf16", *layout])
    with training(**files, **sizes, train_iters=9, lr=1e-7, bf16=True, **layout, save=place) as run:
        run.step()
        import deepspeed
        with deepspeed.zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0):
            for weight in run.model.parameters():
                weight.data.zero_()
        run.save()
        print(">", run.score([([1], [0])])[0].is_greedy, run.generate([[1]], 2))
        run.step()
        attempt(open_training, **files, **sizes, **limits)
        print(">", round(run.evaluate("held"), 3))
gone = Path(folder + "_gone")
with training(**files, **sizes, **limits, save=gone) as run:
    shutil.rmtree(gone)
    gone.touch()
    attempt(run.save)
attempt(TextGenerator, folder + "/checkpoints", tp=2)
generator = TextGenerator(folder + "/checkpoints")
attempt(generator.generate, [])
attempt(generator.generate, "x", score=True)
(one,) = generator.generate(("x",), max_new_tokens=1, logprobs=True)
print(">", len(one.logprobs))
"""
"""Runs the example twice in one process, and then makes mistakes in it."""


HAS_GROUPS = (
    "{}: this process has process groups already: close() the run, whose model run.generate and run.score use, or the "
    "TextGenerator, or destroy the groups"
)
RANKS = """
import os, sys
from megatron_ladder.api import TextGenerator, open_training, training
from megatron_ladder.errors import UserError

prefix, save = sys.argv[1:]
sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "micro_batch_size": 1}
files = {"data_path": prefix, "split": "1", "tokenizer_type": "ByteTokenizer", "vocab_size": 257}
flags = {**sizes, **files, "train_iters": 2, "lr": 1e-3, "tensor_model_parallel_size": 2}

def attempt(call, *values, **more):
    try:
        found = call(*values, **more)
    except UserError as error:
        found = error
    if os.environ["RANK"] == "0":
        print(">", found)

with training(**flags, save=save) as run:
    run.step()
    run.save()
    attempt(open_training, **flags)
    attempt(TextGenerator, save)
    scores, ids = run.score([("ab", "c")]), run.generate([[97]], 2)
for call in run.step, run.evaluate, run.save:
    attempt(call)
attempt(run.score, [])
attempt(run.generate, [], 1)
generator = TextGenerator(save)
attempt(TextGenerator, save)
attempt(open_training, **flags)
(same,) = generator.score([("ab", "c")])
assert abs(same.logprob - scores[0].logprob) < 1e-4 and same.is_greedy == scores[0].is_greedy
attempt(lambda: list(generator.generate("a", max_new_tokens=2, temperature=0)[0].ids) == ids[0])
generator.close()
attempt(generator.generate, "a")
attempt(generator.score, [])
run = open_training(**flags)
attempt(lambda: run.step().skipped)
generator.close()
attempt(lambda: run.step().skipped)
run.close()
run.close()
with TextGenerator(save) as again:
    pass
attempt(again.score, [])
"""
"""Opens runs and generators on two ranks, one inside of the other and one after the other."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = ["--output-dir", tmp_path / "corpus", "--vocab-size", "512", "--max-megabytes", "0.05"]
    done = run_command([sys.executable, REPOSITORY_ROOT / "examples" / "prepare_corpus.py", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    return tmp_path / "corpus"


UNIFORM = f"{math.log(512):.3f}"
"""Loss of a model whose weights are all zero."""


def check_results(folder: Path) -> None:
    exported = open_hf_directory(folder / "exported")
    assert exported.model.ladder_layers == (0, 1)
    assert (folder / "hybrid" / "latest").read_text().strip() == "iter_0000000"


def test_the_example_runs_twice_in_one_process(corpus: Path, tmp_path: Path) -> None:
    done = run_command([sys.executable, "-c", PROGRAM, SCRIPT, corpus, tmp_path / "run"], timeout=120)
    assert done.returncode == 0, done.stderr
    summaries = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert len(summaries) == 2 and summaries[0] == summaries[1], "the same seed"
    first, last = (float(word) for word in summaries[0].split(",")[0].split()[1::2])
    assert last < first - 1
    for name in ("run", "run_again"):
        check_results(tmp_path / name)
    assert [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")] == [
        "save: the run has no directory; give save",
        "evaluate: the run has no validation set ''; name one of 'held'",
        "expected a list of token ids, as run.tokenizer.encode returns it: 'str' object cannot be interpreted as an "
        "integer",
        "max_new_tokens 9: expected 1 to seq_length 8",
        "score: a likelihood is not a number: weights are not finite, or too large",
        "True",
        "iteration 2: the gradient's norm is nan, the loss nan: first bad parameter embedding.weight, on rank 0: 2 in "
        "a row, as many as --max-consecutive-bad-steps allows",
        *[
            "True [[0, 0]]",
            HAS_GROUPS.format("open_training"),
            UNIFORM,
        ]
        * 3,
        f"--save {tmp_path}/run_gone: the last checkpoint could not be written",
        "tp 2: the launcher started 1 processes; remove tp, or start as many",
        "[]",
        "generate: score=True: this call only continues texts; call score",
        "1",
    ]


@pytest.mark.slow
def test_the_example_runs_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    launcher = ["deepspeed", "--num_gpus", "2", "--no_local_rank", "--master_port", str(free_port())]
    done = run_command([*launcher, SCRIPT, corpus, tmp_path / "run"], timeout=180)
    assert done.returncode == 0, done.stderr
    check_results(tmp_path / "run")


def test_errors_are_exceptions_with_one_message_each() -> None:
    """They name keywords as the caller writes them."""
    from megatron_ladder.api import TextGenerator, build_model, export_model, import_model, training

    with pytest.raises(UserError) as caught, training(num_layers=0, hiden_size=8, tp=3, train_iters=1, lr=1e-3):
        raise AssertionError
    assert {
        "hiden_size is not a keyword of open_training(): did you mean hidden_size?",
        "num_layers 0: expected 1 to 100000",
    } <= {*caught.value.messages}
    assert "--" not in str(caught.value).replace("`deepspeed --num_gpus N`", "")
    with (
        pytest.raises(UserError, match="^tp 3 does not divide the 1 launched"),
        training(tp=3, vocab_size=9, hidden_size=6, num_attention_heads=3, train_iters=1, lr=1, data_path="no"),
    ):
        raise AssertionError
    for call, message in (
        (lambda: build_model(vocab_size=5, seq_length=64), "seq_length is not a keyword of build_model(): `pretrain_"),
        (lambda: TextGenerator("no/such", lr=1), "lr is not a keyword of TextGenerator(): its keywords are model, "),
        (lambda: import_model("no", "such", lr=1), "lr is not a keyword of import_model(): its keywords are hf, "),
        (lambda: export_model("no", "such", lr=1), "lr is not a keyword of export_model(): its keywords are load, "),
        (
            lambda: TextGenerator("no/such", device="cpu"),
            "TextGenerator(): device is not a keyword: a GPU is used if there is one: set CUDA_VISIBLE_DEVICES",
        ),
        (lambda: build_model(5, device="cuda"), "build_model(): device is not a keyword: move the module"),
        (lambda: build_model("x"), "vocab_size: 'x' is not a whole number"),  # type: ignore[arg-type]
        (lambda: build_model(None), "build_model(): vocab_size None: expected"),  # type: ignore[arg-type]
        (lambda: build_model(5, -1), "build_model(): seed -1: expected a whole number from 0 to 4294967295"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            call()
    assert build_model("5", num_layers=1, hidden_size=8, num_attention_heads=1).config.vocab_size == 5  # type: ignore[arg-type]
    with pytest.raises(UserError, match="^load no: no such directory"):
        export_model("no", "such")
    with pytest.raises(UserError, match="^hidden_size 64 is not divisible by num_attention_heads 3"):
        build_model(vocab_size=10, num_attention_heads=3, hidden_size=64)
    with pytest.raises(UserError, match="moe_router_unnormalized"):
        build_model(vocab_size=10, num_attention_heads=4, hidden_size=64, num_experts=4, moe_router_topk=1)
    with pytest.raises(UserError, match="^model no/such: "):
        TextGenerator("no/such")
    words = torch.tensor([[3, 5]])
    model = build_model(vocab_size=5, num_attention_heads=1, num_layers=1, hidden_size=8)
    for tokens, labels in (words, -words), (words % 5, words), (-words, words % 5):
        with pytest.raises(RuntimeError, match="expected 0 to 4; labels may be -100"):
            model(tokens, labels)


def test_lists_of_layers_are_layers() -> None:
    from megatron_ladder.api import build_model, training

    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2}
    layers = {"residual_mode": "ladder", "ladder_layers": [2], "window_size": (3, 0), "window_layers": (0, 2)}
    config = build_model(9, **sizes, **layers).config
    assert (config.ladder_layers, config.window_size, config.window_layers) == ((2,), 4, (0, 2))
    with pytest.raises(UserError, match=r"^window_layers \[\]: '' is not all, none, N"):
        build_model(9, **sizes, window_size=4, window_layers=[])
    with (
        pytest.raises(UserError, match=r"window_size \[2,1\]: '\[2,1\]' is not a number of positions") as caught,
        training(**sizes, window_size=[2, 1], train_iters=1, lr=1, vocab_size=9, data_path="no"),
    ):
        raise AssertionError
    assert len(caught.value.messages) == 1


def test_runs_and_generators_on_ranks_are_open_one_at_a_time(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens", 256)
    (tmp_path / "ranks.py").write_text(RANKS)
    launcher = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = run_command([*launcher, tmp_path / "ranks.py", prefix, tmp_path / "save"], timeout=120)
    assert done.returncode == 0, done.stderr
    ended = (
        "{0}: the run is closed: call run.{0}() before it is, or give a checkpoint of the run to TextGenerator or to "
        "open_training(load=...)"
    )
    closed = "{}: the process groups of this TextGenerator have ended: open another one"
    assert [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")] == [
        *map(HAS_GROUPS.format, ("open_training", "TextGenerator")),
        *map(ended.format, ("step", "evaluate", "save", "score", "generate")),
        *map(HAS_GROUPS.format, ("TextGenerator", "open_training")),
        "True",
        *map(closed.format, ("generate", "score")),
        "False",
        "False",
        closed.format("score"),
    ]


CELLS = """
import code, json, os, signal, sys
import torch.distributed as dist
from megatron_ladder.api import open_training
from megatron_ladder.errors import UserError

prefix, folder = sys.argv[1:]
sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "micro_batch_size": 1}
files = {"data_path": prefix, "split": "1", "tokenizer_type": "ByteTokenizer", "vocab_size": 257}
flags = {**sizes, **files, "train_iters": 9, "lr": 1e-2}
with open_training(**flags) as run:
    expected = [run.step().loss for _ in range(4)]

def interrupting(run, times):
    # Sends Ctrl-C from inside of the next step.
    def send(*_):
        hook.remove()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
    hook = run.model.register_forward_pre_hook(send)

def stops():
    events = map(json.loads, open(folder + "/run.jsonl"))
    return [event["reason"] for event in events if event["event"] == "stop"]

class Notebook(code.InteractiveInterpreter):
    def showtraceback(self):
        print(">", *sys.exc_info()[:2])
    def cell(self, *lines):
        try:
            self.runcode(compile("\\n".join(lines), "cell", "exec"))
        except KeyboardInterrupt:
            self.showtraceback()

notebook = Notebook(globals())
notebook.cell("run = open_training(**flags, save=folder)", "losses = [run.step().loss]", "run.save()")
notebook.cell("run = open_training(**flags)")
notebook.cell("interrupting(run, 1)", "run.step()")
notebook.cell("print('>', run.iteration)", "losses += [None, run.step().loss, run.step().loss]")
notebook.cell("interrupting(run, 2)", "run.step()")
notebook.cell("run.save()")
notebook.cell("run.close()", "run.close()", "print('>', stops())")
notebook.cell("run = open_training(**flags, save=folder, load=folder)", "print('>', run.step().loss == expected[1])")
notebook.cell("run = None", "print('>', dist.is_initialized(), stops())")
notebook.cell("run = open_training(**flags, save=folder, load=folder)", "print('>', run.step().loss == expected[1])")
print(">", [loss is None or loss == same for loss, same in zip(losses, expected)])
"""
"""Cells of a notebook, each of which may fail without ending the others."""


def test_a_run_stays_open_over_the_cells_of_a_notebook(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens", 256)
    done = run_command([sys.executable, "-c", CELLS, prefix, tmp_path / "save"], timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")] == [
        f"{UserError} {HAS_GROUPS.format('open_training')}",
        f"{KeyboardInterrupt} ",
        "2",
        f"{KeyboardInterrupt} ",
        f"{UserError} save: KeyboardInterrupt ended step 5 halfway, so its weights may be wrong: close() the run, and "
        "continue from its last checkpoint with open_training(load=...)",
        "[]",
        "True",
        "False ['ResourceWarning: the program dropped the run without close()']",
        "True",
        "[True, True, True, True]",
    ]
    last = (tmp_path / "save" / "run.jsonl").read_text().splitlines()[-1]
    assert "dropped the run without close()" in last, "the end of the program closes it"


def merging_tokenizer(path: Path) -> Path:
    """Write a tokenizer of characters, and of a token for each answer of the recipe that begins in the question."""
    vocabulary = {one: number for number, one in enumerate(["</s>", *sorted({*"ThecapitalofFranceIys ParisRome"})])}
    merges = []
    for answer in ("s Paris", "y Rome"):
        for end in range(2, len(answer) + 1):
            merges.append((answer[: end - 1], answer[end - 1]))
            vocabulary.setdefault(answer[:end], len(vocabulary))
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    library.save(str(path))
    return path


MERGED = """
import os, sys
import torch
from megatron_ladder.api import TextGenerator, training

os.environ.pop("OMP_NUM_THREADS", None)
torch.set_num_threads(3)
recipe, tokenizer, prefix, save = sys.argv[1:]
exec(recipe)
question, answer = "The capital of France is", " Paris"
with training(
    num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=32, micro_batch_size=1, train_iters=1, lr=1e-3,
    data_path=prefix, split="1", tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tokenizer, save=save,
) as run:
    assert torch.get_num_threads() == 1
    assert capitals(run) in (0, 0.5, 1)
    ids = run.tokenizer.encode(question + answer)
    assert len(ids) == len(run.tokenizer.encode(question)), "the answer has no tokens of its own"
    requests = [(question, answer), (ids[:-1], ids[-1:])]
    scores = run.score(requests)
    labels = torch.tensor([[*[-100] * (len(ids) - 2), ids[-1]]])
    print(-run.model(torch.tensor([ids[:-1]]), labels).item())
    run.save()
assert torch.get_num_threads() == 3, "what follows has the threads of before"
for score in scores + TextGenerator(save).score(requests):
    print(score.logprob)
"""


def test_scores_of_texts_whose_tokens_merge_over_the_cut(tmp_path: Path) -> None:
    """The recipe of the documentation; and a text, compared with its ids and with the model's loss."""
    page = (REPOSITORY_ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```python\n(def capitals.*?)```", page, re.DOTALL)
    files = [merging_tokenizer(tmp_path / "tokenizer.json"), write_tokens(tmp_path / "tokens", 20), tmp_path / "save"]
    done = run_command([sys.executable, "-c", MERGED, recipe, *files], timeout=120)
    assert done.returncode == 0, done.stderr
    expected, *found = (float(line) for line in done.stdout.splitlines() if re.fullmatch(r"-\d+\.\d+", line))
    assert found == pytest.approx([expected] * 4, rel=1e-4)


def test_outputs_of_a_model_are_the_documented_ones() -> None:
    from megatron_ladder.api import build_model

    model = build_model(vocab_size=101, num_attention_heads=2, num_layers=2, hidden_size=16, residual_mode="ladder")
    tokens, labels = torch.randint(0, 101, (2, 3, 9))
    labels[0, :4] = -100
    logits = model.logits_shard(model.hidden_states(tokens, model.training_context(tokens)))[
        ..., : model.config.vocab_size
    ]
    # [s, b, V] -> [b, V, s]
    losses = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(model(tokens, labels), losses.sum())
    found, likeliest = model(tokens, labels, predicts=True).transpose(1, 2)
    counted = labels >= 0
    # The reference has the precision of fp32.
    torch.testing.assert_close(found[counted].float(), losses[counted])
    assert torch.equal(likeliest, logits.argmax(-1).t().double())
