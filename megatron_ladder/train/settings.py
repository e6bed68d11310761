"""What every process of a run must have alike, by the names that a user knows it under."""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from megatron_ladder import __version__
from megatron_ladder.comm.launch import Place
from megatron_ladder.config.run import SECTIONS
from megatron_ladder.config.training import ParallelConfig
from megatron_ladder.flags import flag_name
from megatron_ladder.train.inputs import RunInputs, describe_data

DIFFERS = ("local_rank",)
"""Flags that launchers give each process its own value of."""


def shared_settings(inputs: RunInputs, place: Place) -> dict[str, Any]:
    """Everything resolved of the run, the data and the versions of what computes it; JSON-able."""
    run = inputs.run
    fields: dict[str, Any] = {}
    for section in run.to_dict().values():
        if isinstance(section, dict):
            fields |= section
    settings = {flag_names().get(name, name): value for name, value in fields.items() if name not in DIFFERS}
    settings |= deepspeed_file(run.parallel)
    data = describe_data(inputs.sources, inputs.tokenizer, inputs.stream)
    if inputs.stream is not None:
        # There may be many sources, and this travels.
        sources = json.dumps(inputs.stream.sources, sort_keys=True).encode()
        data["stream"] = inputs.stream.cut() | {"sources_sha256": hashlib.sha256(sources).hexdigest()}
    settings |= {f"data: {name}": value for name, value in data.items()}
    return settings | {
        "--load: newest checkpoint": None if inputs.checkpoint is None else inputs.checkpoint.directory.name,
        "number of processes": place.world_size,
        "device": place.device().type,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,
        "version of deepspeed": version("deepspeed"),
        "version of megatron_ladder": __version__,
    }


def flag_names() -> dict[str, str]:
    """Field -> flag, for all flags of the trainer."""
    return {
        field.name: flag_name("no_" + field.name if field.default is True else field.name)
        for section in SECTIONS
        for field in dataclasses.fields(section)
    }


def deepspeed_file(parallel: ParallelConfig) -> dict[str, Any]:
    """The values in --deepspeed_config by their dotted names."""
    if parallel.deepspeed_config is None:
        return {}

    def flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for key, value in values.items():
            leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
        return leaves

    return flat(json.loads(parallel.deepspeed_config.read_text(encoding="utf-8")), "--deepspeed_config: ")
