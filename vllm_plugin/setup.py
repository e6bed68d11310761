"""Copies the configuration class of exported directories into the plugin; the rest is in pyproject.toml.

The class and its tables belong to megatron_ladder, so the plugin can only be built in a clone of its repository.
"""

import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from megatron_ladder.convert.hf_module import CONFIGURATION, configuration_module  # noqa: E402

(HERE / "megatron_ladder_vllm" / f"{CONFIGURATION}.py").write_bytes(configuration_module())
setup()
