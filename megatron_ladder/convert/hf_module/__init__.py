"""The model for transformers. Exported directories contain the files of this folder.

An exported file imports only torch and transformers; the table of wirings is written into it. No other module of the
package imports the two files.
"""

from pathlib import Path

from megatron_ladder.blueprint.wiring import PER_RANK_MODES, SUB_BLOCK_TABLE

CONFIGURATION, MODELING = "configuration_megatron_ladder", "modeling_megatron_ladder"
"""Modules of this folder that are exported with the weights."""
_TABLE_IMPORT = b"from megatron_ladder.blueprint.wiring import PER_RANK_MODES, SUB_BLOCK_TABLE\n"
"""Line of the configuration module that an exported directory replaces with these tables."""


def configuration_module() -> bytes:
    """Return the configuration module with the tables that it imports.

    The build of the plugin for vLLM copies it, in an environment without the packages that this one needs.
    """
    configuration = Path(__file__).with_name(f"{CONFIGURATION}.py").read_bytes()
    assert configuration.count(_TABLE_IMPORT) == 1
    rows = "".join(f"    {name!r}: {row!r},\n" for name, row in SUB_BLOCK_TABLE.items())
    tables = f"PER_RANK_MODES = {PER_RANK_MODES!r}\nSUB_BLOCK_TABLE = {{\n{rows}}}\n"
    return configuration.replace(_TABLE_IMPORT, tables.encode())


def modeling_module() -> bytes:
    """Return the modeling module."""
    return Path(__file__).with_name(f"{MODELING}.py").read_bytes()
