"""Copies the configuration class of exported directories, with the table of wirings, into the plugin.

It belongs to megatron_ladder, so the plugin can only be built in a clone of its repository. The rest of the build is in
pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from megatron_ladder.convert.hf_module import CONFIGURATION, exported_module  # noqa: E402

(HERE / "megatron_ladder_vllm" / f"{CONFIGURATION}.py").write_bytes(exported_module(CONFIGURATION))
setup()
