"""Command line of megatron_ladder.cli.write_reference, from a checkout or an installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron_ladder.cli.write_reference import entry_point  # noqa: E402

if __name__ == "__main__":
    entry_point()
