"""The model for transformers. Exported directories contain the files of this folder.

An exported file imports only torch and transformers; the module of the wirings is written into it. No other module of
the package imports the two files.
"""

from pathlib import Path

from megatron_ladder.blueprint import wiring

CONFIGURATION, MODELING = "configuration_megatron_ladder", "modeling_megatron_ladder"
"""Modules of this folder that are exported with the weights."""
_IMPORT = b"from megatron_ladder.blueprint.wiring import WIRINGS, SubBlockKind, WiredSubBlock\n"
"""Line of the configuration module that an exported directory replaces with that module."""


def exported_module(name: str) -> bytes:
    """Return the content of one of the two modules in an exported directory.

    The build of the plugin for vLLM copies the configuration, in an environment without the packages that this one
    needs.
    """
    return Path(__file__).with_name(f"{name}.py").read_bytes().replace(_IMPORT, Path(wiring.__file__).read_bytes())
