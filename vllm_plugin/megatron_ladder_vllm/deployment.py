"""How vLLM may run a model whose all-reduces run on a side stream: the ranks, and the CUDA graphs.

A piecewise graph ends at each attention. A launch and its wait would be in different graphs, and CUDA rejects a capture
that leaves a stream unjoined. So decode steps use full graphs, and steps with prompts use none.
"""

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig


class DeploymentRules(VerifyAndUpdateConfig):
    """Checks the ranks of a wiring, and selects full CUDA graphs for decode steps before vLLM applies its defaults."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Set the mode of CUDA graphs, unless the user did.

        Raises:
            ValueError: desync, ranks that are not the model's lanes, replicas of experts, or piecewise graphs.
        """
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        if config.num_experts and parallel.data_parallel_size > 1:
            raise ValueError(
                f"--data-parallel-size {parallel.data_parallel_size}: vLLM would exchange tokens between replicas of "
                f"the {config.num_experts} experts; use 1, and one server for each replica"
            )
        if config.lanes:
            if parallel.tensor_parallel_size != config.lanes:
                raise ValueError(
                    f"--tensor-parallel-size {parallel.tensor_parallel_size}: the model has {config.lanes} lanes with "
                    f"own partials, one for each rank: use {config.lanes}"
                )
            if parallel.pipeline_parallel_size > 1:
                raise ValueError(
                    f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: vLLM cannot pass the parts of each "
                    f"of the {config.lanes} lanes on to the next stage: use 1"
                )
        elif config.lane_count:
            raise ValueError(
                f"residual_mode {config.residual_mode!r}: the plugin cannot serve this wiring; use tools/generate.py"
            )
        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        elif compilation.cudagraph_mode.requires_piecewise_compilation():
            raise ValueError(
                f"cudagraph_mode {compilation.cudagraph_mode.name}: piecewise CUDA graphs cannot contain all-reduces "
                "that run during attention; leave it out or use FULL_DECODE_ONLY"
            )
