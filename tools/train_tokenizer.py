"""Command line of megatron_ladder.cli.train_tokenizer, from a checkout or an installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron_ladder.cli.programs import start  # noqa: E402

if __name__ == "__main__":
    start("train_tokenizer")
