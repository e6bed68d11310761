"""Small whole runs of `pretrain_ladder.py`: their token files and command lines, and the scalars that they log."""

import contextlib
import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_ladder.cli import preprocess_data
from tests.helpers.tokens import write_lines

Curves = dict[str, dict[int, float]]
"""The logged scalars by name, and their values by step."""

SPECIAL = ("<b>", "<s>", "</s>", "<|endoftext|>")
BEGIN, START, END, EOD = range(26, 30)
"""Special tokens: a conversation begins, a turn starts, a turn ends, and a document ends, or a row is padded."""
VOCABULARY = 30
SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH = 20, 2, 8
RATES = (1e-3, 5e-4)
"""Learning rates of the steps, by the flags below."""
RECIPE = (
    f"--seed 20 --init-method-std 0.2 --seq-length {SEQ_LENGTH} --micro-batch-size {MICRO_BATCH} "
    f"--global-batch-size {GLOBAL_BATCH} --train-iters {len(RATES)} --lr 1e-3 --min-lr 5e-4 --lr-warmup-iters 1 "
    "--lr-decay-style linear --clip-grad 0.5 --norm-epsilon 1e-2 --adam-eps 1e-2 --log-interval 1 --eval-iters 1 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {corpus}/tokenizer"
)
"""The seed is the best of 22: the scores of experts that a token chooses exceed the next ones by at least 1e-5, while
layouts change scores by 1e-7. The terms in the denominators of norms and AdamW keep rounding
errors of small numbers from growing."""
_DENSE = "--num-layers 7 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 32"
_SIZES = f"{_DENSE} --num-key-value-heads 2"
MODELS = {
    "tied": f"{_SIZES} --residual-mode ladder --ladder-layers 2-6 --tie-embeddings --qk-layernorm --z-loss-coeff 0.02",
    "softmax": f"{_SIZES} --residual-mode ladder --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 8 "
    "--z-loss-coeff 0.02 --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01",
    # The first stage, and one in the middle of six, have dense layers only.
    "sigmoid": f"{_SIZES} --residual-mode farskip --num-experts 16 --moe-layers 2,4-6 --moe-ffn-hidden-size 8 "
    "--moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-topk-scaling-factor 2.5 --moe-aux-loss-coeff 0.05 --moe-router-load-balancing-type aux_loss "
    "--moe-z-loss-coeff 0.01 --expert-sharding experts",
    "biased": f"{_SIZES} --residual-mode ladder --residual-staleness 2 --num-experts 8 --moe-layers 1-5 "
    "--moe-router-topk 3 --moe-ffn-hidden-size 8 --moe-aux-loss-coeff 0.05 --add-moe-bias --quick-geglu "
    "--activation-func-clamp-value 0.4 --glu-linear-offset 1",
    "delta": f"{_SIZES} --residual-mode ladder --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 3 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 4 "
    "--linear-value-head-dim 6",
    # Windows are longer and shorter than many documents, and layers with and without them alternate irregularly.
    "windows": f"{_SIZES} --residual-mode ladder-parallel --window-size 6 --window-attn-skip-freq 3",
    "sinks": f"{_SIZES} --residual-mode ladder --ladder-layers 4 --window-size 3,0 --window-layers 0,2,5 "
    "--softmax-type learnable",
    "distilled": f"{_SIZES} --distill-from {{corpus}}/teacher --distill-weight 0.7 --distill-temperature 2 "
    "--z-loss-coeff 0.02",
}
CORNERS = {
    "experts in no layer": f"{_SIZES} --residual-mode ladder --num-experts 8 --moe-layers none "
    "--moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01",
    "values wider than keys": f"{_DENSE} --residual-mode ladder --kv-lora-rank 6 --qk-nope-head-dim 2 "
    "--qk-rope-head-dim 2 --v-head-dim 6",
    # Six layers divide into two stages of three chunks.
    "one head and one expert": "--num-layers 6 --hidden-size 16 --num-attention-heads 1 --ffn-hidden-size 32 "
    "--residual-mode ladder --num-experts 1 --moe-router-topk 1 --moe-router-unnormalized --moe-aux-loss-coeff 0.05 "
    "--moe-router-score-function sigmoid --moe-z-loss-coeff 0.01",
}
"""Models with a part of the least size, or of none."""
_HYBRID = (
    f"{_SIZES} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 4 --linear-value-head-dim 6 --attention-output-gate "
    "--qk-layernorm --rotary-percent 0.5 --apply-layernorm-1p --residual-mode"
)
_ROUTED = "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 8 --moe-aux-loss-coeff 0.05"
_SHARED = f"{_ROUTED} --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate"
HYBRIDS = {
    "standard": f"{_HYBRID} standard",
    "parallel": f"{_HYBRID} parallel",
    "ladder": f"{_HYBRID} ladder --ladder-layers 1,3-6",
    "deeper ladder": f"{_HYBRID} ladder --residual-staleness 3",
    "ladder-parallel": f"{_HYBRID} ladder-parallel",
    "ladder-attention": f"{_HYBRID} ladder-attention --ladder-layers 3",
    "experts": f"{_HYBRID} ladder {_SHARED}",
    "farskip": f"{_HYBRID} farskip {_SHARED} --moe-layers 1-6",
    "shortcut": f"{_HYBRID} shortcut {_SHARED}",
    "longcat": f"{_HYBRID} longcat {_ROUTED}",
}
"""Gated DeltaNet in three of four layers, in every wiring, with the norms and gates of Qwen3.5."""
TEACHER = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --residual-mode ladder "
    "--window-size 4 --window-layers [0] --softmax-type learnable"
)
_TEXTS = "--train-data-path {corpus}/texts_text_document --valid-data-path {corpus}/texts_text_document"
_CHATS = "--train-data-path {corpus}/chats_messages_document --valid-data-path {corpus}/chats_messages_document"
DATA = {
    "texts": _TEXTS,
    # Rotary positions are relative, so that resetting them matters only where documents see each other.
    "documents": f"{_TEXTS} --reset-position-ids --eod-mask-loss",
    "answers": _CHATS,
    "stream": "--streaming {corpus}/texts.jsonl --streaming-shards 2 --reset-attention-mask --eod-mask-loss "
    "--valid-data-path {corpus}/texts_text_document",
    "conversations": f"{_CHATS} --loss-on all --reset-position-ids --reset-attention-mask",
}
LAYOUTS = {
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2 --zero-stage 0"),
    "pp3": (3, "--pipeline-model-parallel-size 3 --recompute-granularity full"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp6": (6, "--pipeline-model-parallel-size 6"),
    "pp2x2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"),
    "pp3x2": (3, "--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2 --zero-stage 0"),
    "tp2-pp2x2": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--sequence-parallel --recompute-granularity full --recompute-num-layers 3",
    ),
    "tp2-pp3": (6, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --recompute-granularity full"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"),
    "dp2": (2, "--zero-stage 2 --recompute-granularity full"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2 --zero-stage 3"),
}
"""Number of processes, and flags. A step has four micro-batches, or two on each of two data-parallel ranks. Seven
layers do not divide evenly into any number of stages. 2x2: two stages of two ranges of layers each."""
CORNER_LAYOUTS = LAYOUTS | {
    "pp2x3": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --zero-stage 0")
}
"""Those of `CORNERS`; 2x3: one layer per chunk of six layers."""
EXPERT_LAYOUTS = {
    "ep2": (2, "--expert-model-parallel-size 2 --zero-stage 0"),
    "ep2-dp4": (4, "--expert-model-parallel-size 2 --moe-expert-capacity 3 --recompute-granularity full"),
    "ep4": (4, "--expert-model-parallel-size 4"),
    "ep2-pp2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "ep2-tp2": (2, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "ep4-tp2": (
        4,
        "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--recompute-granularity full --zero-stage 0",
    ),
    "ep2-tp2-pp2x2": (
        4,
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    ),
}
"""Those of `EXPERT_MODELS`, in which ranks exchange tokens."""
EXPERT_MODELS = ("softmax", "sigmoid", "biased")
EXACT = ("train/learning rate", "train/largest expert load", "train/expert load entropy", "train/dead experts")
TOLERANCE = 1e-6
_TEMPLATE = (
    "<b>{% for m in messages %}{{ '<s>' + m['role'][0] + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


def write_corpus(folder: Path) -> Path:
    """Write a tokenizer, and texts and conversations, both also as preprocessed token files; return the folder."""
    chance = random.Random(5)

    def text(shortest: int, longest: int) -> str:
        return "".join(chance.choices(ascii_lowercase, k=chance.randint(shortest, longest)))

    (folder / "tokenizer").mkdir()
    letters = {letter: number for number, letter in enumerate(ascii_lowercase)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    assert [*map(tokenizer.token_to_id, SPECIAL)] == [BEGIN, START, END, EOD]
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = json.dumps({"eos_token": "<|endoftext|>", "chat_template": _TEMPLATE})
    (folder / "tokenizer" / "tokenizer_config.json").write_text(config)
    write_lines(folder / "texts.jsonl", [text(2, 30) for _ in range(200)])
    rounds = (("user", "assistant") * (2 if chance.random() < 0.25 else 1) for _ in range(120))
    chats = [[{"role": role, "content": text(1, 5)} for role in roles] for roles in rounds]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    for name, flags in (("texts", ["--append-eod"]), ("chats", ["--chat"])):
        paths = ["--input", f"{folder}/{name}.jsonl", "--output-prefix", f"{folder}/{name}"]
        words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{folder}/tokenizer"]
        with contextlib.redirect_stdout(io.StringIO()):
            preprocess_data.main([*paths, *words, *flags])
    return folder


def command_line(corpus: Path, *flags: str) -> list[str]:
    """Return the words of the recipe and of further flags."""
    return [word.format(corpus=corpus) for word in " ".join([RECIPE, *flags]).split()]


def curves_in(folder: Path) -> Curves:
    """Return what --tensorboard-dir contains, except the speed and the memory of the machine."""
    return {name: curve for name, curve in scalars_in(folder).items() if not name.startswith(("speed/", "memory/"))}


def scalars_in(folder: Path) -> Curves:
    """Return all curves of --tensorboard-dir by step."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def assert_equal_curves(
    found: Curves, expected: Mapping[str, Mapping[int, float]], tolerance: float = TOLERANCE
) -> None:
    """Compare all scalars of all steps: learning rates and loads exactly, the others to this relative tolerance."""
    assert found.keys() == expected.keys()
    wrong = []
    for name, values in expected.items():
        assert found[name].keys() == values.keys(), name
        allowed = 0.0 if name in EXACT else tolerance
        for step, value in values.items():
            if found[name][step] != pytest.approx(value, rel=allowed, abs=0.0):
                error = found[name][step] / value - 1 if value else found[name][step]
                wrong.append(f"{name}, step {step}: {found[name][step]:.8g} instead of {value:.8g} ({error:+.1e})")
    assert not wrong, "\n" + "\n".join(wrong)
