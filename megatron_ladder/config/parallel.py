"""How the model and the batch are shared out over processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.config.fields import flag


@dataclass(frozen=True)
class ParallelConfig:
    """Processes. How the model, the batch and the optimizer are shared out."""

    tensor_model_parallel_size: int = 1
    """Processes that each hold a slice of every layer."""
    pipeline_model_parallel_size: int = 1
    """Processes that each hold a range of layers; this version has 1."""
    zero_stage: Literal["0", "1", "2", "3"] = "1"
    """What data-parallel processes share out: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
    --bf16 and --fp16 need 1 at least, pipeline parallelism 1 at most."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """cpu: keep the optimizer's state and fp32 master weights in the host's memory, and update them there."""
    tp_overlap: bool = True
    """Wait for every tensor-parallel all-reduce as soon as it is started (for comparison; the results are equal)."""
    distributed_timeout_minutes: float = 10.0
    """Minutes after which a collective that a process waits in is an error."""
    deepspeed: bool = False
    """Accepted for scripts that give it; DeepSpeed always runs the optimizer."""
    deepspeed_config: Path | None = flag(None, aliases=("--deepspeed_config",))
    """A DeepSpeed JSON file. What the command line decides may be left out of it or be "auto"; a value that
    contradicts the command line is an error."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Given by launchers; the environment's LOCAL_RANK is what counts."""
