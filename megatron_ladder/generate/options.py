"""The flags of tools/generate.py. No torch here: a process that only starts the ranks needs none."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.config.fields import flag, parse_command_line
from megatron_ladder.data.kinds import TokenizerType
from megatron_ladder.errors import UserError

PROGRAM = "generate.py"
DESCRIPTION = "Continues prompts with a trained model, tensor-parallel. Text goes to stdout, statistics to stderr."
