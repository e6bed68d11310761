"""The parsers accept every command of the pages, and every flag in their text exists."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ladder.cli.programs import PROGRAMS, load_program
from megatron_ladder.config.megatron_flags import ACCEPTED, REFUSED
from megatron_ladder.flags import flag_name, section_flags
from tests.docs.pages import ROOT, code_spans, fences, indented_lines, mark_errors, page_paths, read_page
from tests.docs.reading import read_command
from tests.docs.shell import OPEN_END, commands

OTHERS = {
    "--help",
    "--slow",
    "--nproc-per-node",
    "--num_gpus",
    "--node_rank",
    "--master_addr",
    "--local-dir",
    "--logdir",
    "--shm-size",
    "--flag",
    # vLLM's.
    "--enforce-eager",
    "--pipeline-parallel-size",
    "--quantization",
    "--tensor-parallel-size",
    "--trust-remote-code",
    # lm-eval's.
    "--apply_chat_template",
    "--batch_size",
    "--gen_kwargs",
    "--model_args",
}
"""Flags of other programs that the pages mention, and a placeholder for any flag."""
SCRIPTS = (
    "examples/multi_node.sh",
    "examples/adapt_llama/adapt.sh",
    "examples/paper/train.sh",
    "examples/paper/check.py",
    "examples/paper/evaluate.sh",
    "examples/paper/evaluations.py",
    "tests/chaos/run.py",
    "vllm_plugin/benchmark.py",
)
"""Scripts whose flags are not declared by a dataclass."""
CALL = re.compile(r"^(python|deepspeed|torchrun|bash|sbatch|pip|tools/\w+\.py|pretrain_ladder\.py)\s")


def flags_of_script(source: str) -> list[str]:
    """Return the flags in a script's text, and those derived from fields of its dataclasses."""
    fields = re.findall(r"^    ([a-z_]+): ", source, re.MULTILINE)
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", source) + [flag_name(field) for field in fields]


@functools.cache
def known_flags() -> set[str]:
    ours = {
        spelling
        for program in PROGRAMS
        for command in load_program(program).COMMANDS
        for section in command.sections
        for one in section_flags(section)
        # The opposite of a switch overrides a configuration file.
        for spelling in (*one.spellings, flag_name(one.field_name), flag_name(f"no_{one.field_name}"))
    }
    scripts = {name for script in SCRIPTS for name in flags_of_script((ROOT / script).read_text(encoding="utf-8"))}
    return ours | scripts | ACCEPTED.keys() | REFUSED.keys() | OTHERS


def page_errors(page: str, text: str) -> list[str]:
    """Return one line per error in the commands of a page."""
    errors = mark_errors(page, text)
    for fence in fences(page, text):
        for words in commands(fence.text) if fence.language == "bash" else ():
            found = read_command(words)
            if found is None and not fence.mark:
                errors.append(
                    f"{fence.place}: {words[0]} is not our program: mark the fence <!-- run: session --> or "
                    "<!-- not run: reason -->"
                )
            errors += [f"{fence.place}: {error}" for error in found or ()]
    for line, text_of_line in indented_lines(text):
        if CALL.match(text_of_line):
            errors.append(f"{page}:{line}: commands must be in a bash fence, found indented text")
    return errors + span_errors(page, text)


def span_errors(page: str, text: str) -> list[str]:
    """Return one line per error in inline commands, which may be incomplete, and inline flags."""
    errors, known = [], known_flags()
    for span in code_spans(text):
        if CALL.match(span):
            whole = span if span.startswith(("python", "deepspeed", "torchrun", "bash", "pip")) else f"python {span}"
            for words in commands(whole):
                errors += [f"{page}: `{span}`: {error}" for error in read_command([*words, OPEN_END]) or ()]
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            if flag not in known:
                errors.append(f"{page}: `{span}`: {flag} is not a flag of any program")
    return errors


@pytest.mark.parametrize("page", page_paths())
def test_the_programs_accept_the_commands_of_a_page(page: str) -> None:
    assert page_errors(page, read_page(page)) == []


def fenced(command: str, mark: str = "") -> str:
    return f"{mark}\n```bash\n{command}\n```\n"


TRAINING = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 3 --lr 1e-3 "
    "--data-path corpus_text_document --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fenced("python tools/plan.py --gpu 8"), "--gpu is not a flag of this program: did you mean --gpus?"),
        (fenced("python tools/plan.py \\\n    --cluster h300"), "--cluster h300: expected one of"),
        (fenced("A=1 python tools/generate.py --model m --prompt x --stop"), "--stop: expected at least one"),
        (fenced("python tools/generate.py --model m --json --stream"), "--json and --stream exclude each other"),
        (fenced("python tools/missing.py --x"), "tools/missing.py: no such script"),
        (fenced("cd x && python tools/inspect_data.py p --verfy", "<!-- not run: why -->"), "--verfy is not a flag"),
        (fenced("for s in 1 2; do\n  python tools/plan.py --seed $s\ndone"), "--seed is not a flag"),
        (fenced("python tools/convert_checkpoint.py export --load c"), "--hf is required"),
        (fenced(f"deepspeed --num_gpus 8 pretrain_ladder.py {TRAINING} --ladder-layer 2"), "--ladder-layer is not"),
        (fenced(f"deepspeed --num_gpus 8 pretrain_ladder.py {TRAINING} --tensor-model-parallel-size 3"), "the 8 la"),
        (fenced(f"torchrun --nproc-per-node 2 pretrain_ladder.py {TRAINING} --streaming x"), "exclude each other"),
        (fenced("deepspeed --num_gpu_s 8 pretrain_ladder.py ..."), "deepspeed: "),
        (fenced("deepspeed pretrain_ladder.py ... --zero-stage 4"), "'4' is not one of"),
        (fenced("bash examples/multi_node.sh --node-ranks N"), "examples/multi_node.sh has no flag --node-ranks"),
        (fenced("python tests/chaos/run.py --kill 3"), "tests/chaos/run.py has no flag --kill"),
        (fenced("bash tests/run.sh tests/units"), "tests/units: no such path"),
        (fenced("megatron-ladder-plan --gpu 8"), "--gpu is not a flag"),
        (fenced("pip install x"), "pip is not our program"),
        (fenced("ls", "<!-- not run -->"), "a reason is missing"),
        (fenced("ls", "<!-- run: a b -->"), "expected <!-- run: session -->"),
        ("<!-- not run: why -->\n\nwords\n" + fenced("python tools/plan.py"), "a mark must be directly above"),
        ("```bash\npython tools/plan.py\n", "a fence is not closed"),
        ("words\n\n    python tools/plan.py\n", "a.md:3: commands must be in a bash fence"),
        ("`tools/plan.py --gpu 8`", "--gpu is not a flag of this program"),
        ("`python tools/generate.py ...\n--stream --json`", "--json and --stream"),
        ("and `--micro-batch-sise`", "--micro-batch-sise is not a flag of any program"),
    ],
)
def test_an_error_is_found(text: str, message: str) -> None:
    errors = page_errors("a.md", text)
    assert len(errors) >= 1 and message in errors[0], errors


@pytest.mark.parametrize(
    "text",
    [
        fenced("pip install x | tee y", "<!-- not run: needs a network -->"),
        fenced("# words\npython tools/plan.py --gpus 8 > out.txt 2>&1   # more words"),
        fenced("python tools/generate.py --model m \\\n    --prompt 'a; b && c # d' --seed \"$SEED\""),
        fenced(f"deepspeed --num_gpus 8 pretrain_ladder.py {TRAINING} --tensor-model-parallel-size 4"),
        fenced("python tools/convert_checkpoint.py export ... --dtype bf16"),
        fenced("cat > keys << END\npython tools/plan.py --gpu\nEND", "<!-- run: a -->"),
        "```python\nimport x\n```\n",
        "`--micro-batch-size 4` and `python pretrain_ladder.py --help`",
    ],
)
def test_correct_commands_pass(text: str) -> None:
    assert page_errors("a.md", text) == []


@dataclass(frozen=True)
class Smaller:
    """Data, without --verify."""

    data_path: tuple[Path, ...]
    """Prefixes."""


def test_a_removed_flag_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = fenced("python tools/inspect_data.py p --verify")
    assert page_errors("a.md", text) == []
    monkeypatch.setattr(load_program("inspect_data"), "InspectConfig", Smaller)
    assert page_errors("a.md", text) == [
        "a.md:2: tools/inspect_data.py: --verify is not a flag of this program: see --help"
    ]
