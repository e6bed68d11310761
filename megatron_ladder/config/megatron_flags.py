"""Megatron's flags that this trainer does not have: those that ask for what is done anyway, and those refused.

Users bring launch scripts from Megatron-DeepSpeed; every flag of theirs is obeyed, accepted because it changes
nothing, or refused with what to use instead. None is ignored.
"""

ACCEPTED: dict[str, tuple[str, ...]] = {
    "--swiglu": (),
    "--normalization": ("rmsnorm",),
    "--use-rotary-position-embeddings": (),
    "--position-embedding-type": ("rope",),
    "--untie-embeddings-and-output-weights": (),
    "--disable-bias-linear": (),
    "--attention-dropout": ("0",),
    "--hidden-dropout": ("0",),
    "--use-flash-attn": (),
    "--use-flash-attn-v2": (),
    "--group-query-attention": (),
    "--no-query-key-layer-scaling": (),
    "--no-gradient-accumulation-fusion": (),
    "--no-masked-softmax-fusion": (),
    "--no-bias-gelu-fusion": (),
    "--no-bias-dropout-fusion": (),
    "--no-async-tensor-model-parallel-allreduce": (),
    "--accumulate-allreduce-grads-in-fp32": (),
    "--attention-softmax-in-fp32": (),
    "--use-mcore-models": (),
    "--make-vocab-size-divisible-by": ("128",),
    "--optimizer": ("adam", "adamw"),
    "--dataloader-type": ("single",),
    "--distributed-backend": ("nccl", "gloo"),
    "--no-pipeline-parallel": (),
    "--no-create-moe-param-group": (),
    "--rotary-percent": ("1",),
    "--ds-sequence-parallel-size": ("1",),
    "--context-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
}
"""Flag -> the values that mean what is done anyway; an empty tuple marks a switch."""

_NO_MOE = "layers are dense; there are no experts"
_NO_CONTEXT = "use --tensor-model-parallel-size, and --recompute-granularity full for long sequences"
_NO_FP8 = "use --bf16"
_ITERATIONS = "count in steps: use --train-iters, --lr-decay-iters and --lr-warmup-iters"
_ROTARY = "positions are rotary: use --rotary-base and --rope-scaling"
_RECOMPUTE = "use --recompute-granularity full"
_LLAMA = "the model is Llama's: RMSNorm and SwiGLU without dropout"

REFUSED: dict[str, str] = {
    "--num-experts": _NO_MOE,
    "--moe-router-topk": _NO_MOE,
    "--moe-expert-parallel-size": _NO_MOE,
    "--moe-grouped-gemm": _NO_MOE,
    "--topk": _NO_MOE,
    "--cp-comm-type": _NO_CONTEXT,
    "--force-ds-sequence-parallel": _NO_CONTEXT,
    "--sequence-parallel": "the residual stream is replicated; leave the flag out",
    "--fp8-format": _NO_FP8,
    "--fp8-hybrid": _NO_FP8,
    "--fp8-margin": _NO_FP8,
    "--fp16": "use --bf16",
    "--loss-scale": "bf16 needs no loss scaling; leave the flag out",
    "--initial-loss-scale": "bf16 needs no loss scaling; leave the flag out",
    "--num-layers-per-virtual-pipeline-stage": "stages hold one contiguous range of layers; leave the flag out",
    "--num-virtual-stages-per-pipeline-rank": "stages hold one contiguous range of layers; leave the flag out",
    "--gradient-accumulation-fusion": "gradients are accumulated by the optimizer; leave the flag out",
    "--use-distributed-optimizer": "use --zero-stage 1",
    "--overlap-grad-reduce": "gradients are reduced once a step; leave the flag out",
    "--overlap-param-gather": "leave the flag out",
    "--tp-comm-overlap": "all-reduces overlap by the wiring: use --residual-mode ladder",
    "--parallel-attn-mlp": "use --residual-mode parallel",
    "--train-samples": _ITERATIONS,
    "--train-tokens": _ITERATIONS,
    "--lr-decay-samples": _ITERATIONS,
    "--lr-warmup-samples": _ITERATIONS,
    "--lr-decay-tokens": _ITERATIONS,
    "--lr-warmup-tokens": _ITERATIONS,
    "--lr-warmup-fraction": "use --lr-warmup-iters",
    "--rampup-batch-size": "use one --global-batch-size",
    "--checkpoint-activations": _RECOMPUTE,
    "--deepspeed-activation-checkpointing": _RECOMPUTE,
    "--checkpoint-num-layers": "use --recompute-num-layers",
    "--recompute-activations": _RECOMPUTE,
    "--recompute-method": "the first --recompute-num-layers layers are recomputed; leave the flag out",
    "--distribute-saved-activations": _RECOMPUTE,
    "--add-position-embedding": _ROTARY,
    "--use-rope-scaling": "use --rope-scaling llama3 or linear",
    "--rope-scaling-type": "use --rope-scaling llama3 or linear",
    "--squared-relu": _LLAMA,
    "--openai-gelu": _LLAMA,
    "--apply-layernorm-1p": _LLAMA,
    "--apply-residual-connection-post-layernorm": _LLAMA,
    "--window-size": "attention is causal over the whole sequence",
    "--start-weight-decay": "use one --weight-decay",
    "--end-weight-decay": "use one --weight-decay",
    "--merge-file": "convert the vocabulary to a tokenizer.json and use --tokenizer-type HuggingFaceTokenizer",
    "--data-impl": "data sets are memory-mapped .bin and .idx files; leave the flag out",
    "--mmap-warmup": "leave the flag out",
    "--ckpt-format": "checkpoints have one format; leave the flag out",
    "--use-torch-fsdp2": "use --zero-stage 1",
    "--no-load-optim": "leave the flag out: a checkpoint is continued whole",
    "--no-load-rng": "leave the flag out: a checkpoint is continued whole",
    "--no-save-optim": "leave the flag out: a checkpoint is saved whole",
    "--no-save-rng": "leave the flag out: a checkpoint is saved whole",
}
"""Flag -> what to use instead."""
