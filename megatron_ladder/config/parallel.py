"""How the model and the batch are shared out over processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.flags import flag


@dataclass(frozen=True)
class ParallelConfig:
    """Processes. How the model, the batch and the optimizer are shared out."""

    tensor_model_parallel_size: int = 1
    """Processes that each hold a slice of every layer."""
    pipeline_model_parallel_size: int = 1
    """Processes that each hold a range of layers, its stages. A global batch fills the pipeline by its accumulation
    steps: give it several times as many of them as there are stages."""
    pipeline_partition: Literal["uniform", "parameters"] = "uniform"
    """How layers are shared out over stages. uniform: the same number each, one more for the first ones if it does not
    go even. parameters: the largest stage is as small as can be, with embedding and head counted in."""
    zero_stage: Literal["0", "1", "2", "3"] = "1"
    """What data-parallel processes share out: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
    --bf16 and --fp16 need 1 at least, pipeline parallelism 1 at most."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """cpu: keep the optimizer's state and fp32 master weights in the host's memory, and update them there."""
    tp_overlap: bool = True
    """Wait for every tensor-parallel all-reduce as soon as it is started (for comparison; the results are equal)."""
    sequence_parallel: bool = False
    """Keep the residual stream and its norms cut along the sequence over the tensor-parallel processes, which saves
    activation memory: all-reduces become a reduce-scatter and an all-gather. Not for --residual-mode desync."""
    tp_comm_max_ctas: int = 16
    """On GPUs, most thread blocks, and so multiprocessors, that a tensor-parallel collective takes from the
    computation that it runs under; 0 leaves it to NCCL. 16 is an eighth of an H100; left to itself NCCL takes up to
    32, and large collectives then give back more than half of the time that they hide."""
    distributed_timeout_minutes: float = 10.0
    """Minutes to wait for other processes at the start, and in collectives until the first step is done, while a
    checkpoint is written and in evaluation."""
    distributed_timeout_seconds_after_first_step: float = 120.0
    """Seconds to wait in a collective of later steps, never more than --distributed-timeout-minutes. Shortly before
    they are over, each process that makes no progress prints its stacks and what it waits for."""
    deepspeed: bool = False
    """Accepted for scripts that give it; DeepSpeed always runs the optimizer."""
    deepspeed_config: Path | None = flag(None, aliases=("--deepspeed_config",))
    """A DeepSpeed JSON file. What the command line decides may be left out of it or be "auto"; a value that
    contradicts the command line is an error."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Given by launchers; the environment's LOCAL_RANK is what counts."""
