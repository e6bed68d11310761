"""Copies the configuration class of exported directories and the table of wirings into the plugin.

They belong to megatron_ladder, so the plugin can only be built in a clone of its repository. The rest of the build is
in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from megatron_ladder.blueprint import wiring  # noqa: E402
from megatron_ladder.convert.hf_module import CONFIGURATION, configuration_module  # noqa: E402

PACKAGE = HERE / "megatron_ladder_vllm"
(PACKAGE / f"{CONFIGURATION}.py").write_bytes(configuration_module())
(PACKAGE / "wiring.py").write_bytes(Path(wiring.__file__).read_bytes())
setup()
