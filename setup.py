"""Package metadata: supported ranges stand here, the exact versions that are tested in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

PROGRAMS = {
    "pretrain": "pretrain",
    "preprocess-data": "preprocess_data",
    "train-tokenizer": "train_tokenizer",
    "merge-datasets": "merge_datasets",
    "inspect-data": "inspect_data",
    "prepare-corpus": "prepare_corpus",
    "generate": "generate",
    "convert-checkpoint": "convert_checkpoint",
    "benchmark": "benchmark",
    "benchmark-data": "benchmark_data",
    "plan": "plan",
    "plot-loss": "plot_loss",
    "exposed-communication": "exposed_communication",
    "throughput": "throughput",
    "run-resilient": "run_resilient",
    "report-run": "report_run",
    "study": "study",
}
"""megatron-ladder-<key> runs entry_point of megatron_ladder.cli.<value>."""

REQUIRED = [
    "torch>=2.13,<3",
    # The state of its optimizers is read from their attributes, so a new minor release is a decision.
    "deepspeed>=0.19.8,<0.20",
    "msgspec>=0.19,<1",
    "numpy>=2.0,<3",
    "psutil>=6",
    "safetensors>=0.6,<1",
    "sentencepiece>=0.2.1,<0.3",
    "tensorboard>=2.19,<3",
    "tokenizers>=0.22,<1",
    "tqdm>=4.66,<5",
    "xxhash>=3.5,<5",
]
PLOT = ["matplotlib>=3.9,<4"]
# Fast tokenizers, and what some formats need; without them other libraries do the work, or the format is refused.
DATA = [
    "backports.zstd>=1.0,<2; python_version<'3.14'",
    "datasets>=4.0,<6",
    "gigatoken>=0.10,<0.11",
    "pyarrow>=17",
    "tiktoken>=0.9,<1",
]
# To compare logits of conversions, and for the example that adapts a Llama.
HF = ["transformers>=5.0,<6"]
# Both are pure Python on a handful of small packages.
SERVE = ["starlette>=1.0,<2", "uvicorn>=0.40,<1"]
# To fit the planner's model to measurements, and for statistics of studies.
LAB = ["scipy>=1.14,<2"]
TEST = ["mypy>=1.18", "openai>=3,<4", "pytest>=8.4", "ruff>=0.14", *DATA, *HF, *LAB, *PLOT, *SERVE]


def read_version() -> str:
    """`__version__` of the package, read as text: importing it is not possible before it is installed."""
    source = (ROOT / "megatron_ladder" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('megatron_ladder/__init__.py: expected a line __version__ = "..."')
    return found.group(1)


setup(
    name="megatron-ladder",
    version=read_version(),
    description="Pretraining, conversion and generation for Ladder Residual transformers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_ladder", "megatron_ladder.*"]),
    package_data={"megatron_ladder": ["py.typed"]},
    install_requires=REQUIRED,
    extras_require={"data": DATA, "hf": HF, "lab": LAB, "plot": PLOT, "serve": SERVE, "test": TEST},
    entry_points={
        "console_scripts": [
            f"megatron-ladder-{program} = megatron_ladder.cli.{module}:entry_point"
            for program, module in PROGRAMS.items()
        ]
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
