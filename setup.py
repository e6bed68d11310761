"""Package metadata. Supported version ranges are listed here, and the tested versions in constraints.txt."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

REQUIRED = [
    "torch>=2.11,<3",
    # The state of its optimizers is read from their attributes, so a new minor release needs a review.
    "deepspeed>=0.19.8,<0.20",
    "msgspec>=0.19,<1",
    "numpy>=2.0,<3",
    "psutil>=6",
    "pyyaml>=6,<7",
    "safetensors>=0.6,<1",
    "sentencepiece>=0.2.1,<0.3",
    "tensorboard>=2.19,<3",
    "tokenizers>=0.22,<1",
    "tqdm>=4.66,<5",
    "xxhash>=3.5,<5",
]
PLOT = ["matplotlib>=3.9,<4"]
# Some input formats, which are rejected without them.
DATA = [
    "backports.zstd>=1.0,<2; python_version<'3.14'",
    "datasets>=5.2,<6",
    "pyarrow>=17",
]
# Comparison of logits after conversions, and the example that adapts a Llama model.
HF = ["transformers>=5.2,<6"]
# Kernels of gated DeltaNet for GPUs.
FLA = ["flash-linear-attention>=0.4,<1"]
WANDB = ["wandb>=0.20,<1"]
# To run evaluation tasks on the generation engine.
EVAL = ["lm-eval[hf]>=0.4.13,<0.5"]
# To fit the planner's model to measurements, and for statistics of studies.
LAB = ["pandas>=2.2,<4", "scipy>=1.14,<2"]
TEST = [
    "build>=1.3,<2",
    "mypy>=1.18",
    # The reference, docs/write_reference.py.
    "pdoc>=16,<17",
    "pytest>=8.4",
    "requests>=2.32,<3",
    "ruff>=0.14",
    # Builds the wheel and the plugin without isolation.
    "setuptools>=77",
    *DATA,
    *HF,
    *LAB,
    *PLOT,
    *WANDB,
]


def read_version() -> str:
    """Return `__version__`, read as text because the package is not installed yet."""
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
    # Experiments about the product; nothing in megatron_ladder imports them.
    packages=[*find_packages(include=["megatron_ladder*"]), *find_packages("tools", include=["ladder_lab*"])],
    package_dir={"ladder_lab": "tools/ladder_lab"},
    package_data={"megatron_ladder": ["py.typed"], "ladder_lab": ["cost/*.csv"]},
    install_requires=REQUIRED,
    extras_require={
        "data": DATA,
        "eval": EVAL,
        "fla": FLA,
        "hf": HF,
        "lab": LAB,
        "plot": PLOT,
        "test": TEST,
    },
    entry_points={
        "console_scripts": runpy.run_path(str(ROOT / "megatron_ladder" / "cli" / "programs.py"))["console_scripts"](),
        # Found by the versions of lm-eval after 0.4.13.
        "lm_eval.models": ["megatron_ladder = megatron_ladder.lm_eval:LadderLM"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
