"""What is on disk of a training run, and how it gets there: see `format`."""

from megatron_ladder.checkpoint.format import Checkpoint, TensorInfo, find_checkpoint
from megatron_ladder.checkpoint.manifest import FileIndex, merge_manifest
from megatron_ladder.checkpoint.publish import (
    create_temporary_directory,
    publish,
    temporary_directory,
    write_manifest,
)
from megatron_ladder.checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "FileIndex",
    "TensorInfo",
    "create_temporary_directory",
    "find_checkpoint",
    "merge_manifest",
    "publish",
    "temporary_directory",
    "write_manifest",
]
