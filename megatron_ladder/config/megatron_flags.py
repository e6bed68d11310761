"""Flags of Megatron and of other trainers that this trainer does not have.

Users bring launch scripts from Megatron-LM and Megatron-DeepSpeed. A flag that requests what the trainer does anyway is
accepted. Any other flag is rejected, with what to use instead or the reason. No flag is silently ignored.
"""

import functools
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from megatron_ladder.command_line import Settings
from megatron_ladder.errors import Problem
from megatron_ladder.flags import keyword_name

_RULES = {
    "leave it out": """
        --swiglu! --use-rotary-position-embeddings! --untie-embeddings-and-output-weights! --disable-bias-linear!
        --use-flash-attn! --use-flash-attn-v2! --group-query-attention! --no-query-key-layer-scaling!
        --no-gradient-accumulation-fusion! --no-masked-softmax-fusion! --no-bias-gelu-fusion! --no-bias-dropout-fusion!
        --no-bias-swiglu-fusion! --no-rope-fusion! --recompute-activations! --no-persist-layer-norm! --use-mcore-models!
        --no-position-embedding! --accumulate-allreduce-grads-in-fp32! --fp32-allreduce! --attention-softmax-in-fp32!
        --calculate-per-token-loss! --cross-entropy-loss-fusion! --no-create-attention-mask-in-dataloader!
        --use-checkpoint-args! --load-main-params-from-ckpt! --exit-signal-handler! --exit-signal-handler-for-training!
        --check-for-nan-in-loss-and-grad! --no-pipeline-parallel! --log-throughput! --use-pytorch-profiler!
        --log-memory-to-tensorboard! --log-validation-ppl-to-tensorboard! --no-log-loss-scale-to-tensorboard!
        --disable-log-loss-scale-to-tensorboard! --no-one-logger! --tokenizer-hf-use-fast! --moe-grouped-gemm!
        --disable-moe-token-dropping! --disable-moe-top2-2nd-expert-sampling! --no-create-moe-param-group!
        --moe-shared-expert-overlap! --delay-wgrad-compute! --overlap-dispatch-backward-with-experts-wgrad!
        --high-priority-a2a-comm-stream!
        --normalization=rmsnorm --attention-dropout=0 --hidden-dropout=0
        --make-vocab-size-divisible-by=128 --vocab-extra-ids=0 --data-impl=mmap --dataloader-type=single
        --sample-rate=1 --transformer-impl=local --attention-backend=auto,flash
        --mlp-type=standard --moe-router-dtype=fp32 --timing-log-level=0 --empty-unused-memory-level=0
        --num-distributed-optimizer-instances=1 --exit-signal=sigterm,sigint --DDP-impl=local""",
    "NCCL is used on GPUs and gloo on CPUs: leave it out": "--distributed-backend=nccl",
    # Sizes and parts of the model.
    "use --num-layers": "--encoder-num-layers --decoder-num-layers",
    "use --seq-length": "--encoder-seq-length --decoder-seq-length --max-seq-length --max-length",
    "positions are rotary, in all layers, with the one position of a token: other models are not supported": """
        --add-position-embedding --relative-attention-* --mrope-section --no-rope-freq""",
    "the halves of a head form the pairs, which only renumbers its elements: leave it out": "--rotary-interleaved",
    "use --rope-scaling yarn for yarn; other models are not supported": "--position-embedding-type=rope",
    "use --rotary-base": "--rotary-position-embeddings-theta",
    "use --rope-scaling llama3, and --rope-scaling-factor, which is 8 by default in Megatron": "--use-rope-scaling",
    "use --rope-scaling yarn with --rotary-scaling-factor, and --rope-original-max-position-embeddings, which is 4096 "
    "by default in Megatron": "--rope-type=rope",
    "use --rope-scaling": "--rope-scaling-type",
    "use --rope-scaling linear --rope-scaling-factor": "--rotary-seq-len-interpolation-factor",
    "the activation is SwiGLU, or with --quick-geglu another gated one: leave it out": """
        --openai-gelu --squared-relu --use-te-activation-func --use-fused-weighted-squared-relu""",
    "norms are RMSNorm before each sub-block, in the precision of the run: leave it out": """
        --apply-residual-connection-post-layernorm --fp32-residual-connection
        --disable-mem-efficient-ln --fused-residual-rmsnorm --embedding-weights-in-fp32""",
    "a query sees all tokens before it, or those of its document with --reset-attention-mask: other models are not "
    "supported": """
        --qk-l2-norm --*dsa-* --gdp-*""",
    "use --reset-attention-mask": "--dataloader-inter-document-masking",
    "the weights of queries and keys are not clipped: leave it out, which trains them otherwise": "--qk-clip*",
    "attention computes the same without it, and does not log its logits: leave it out": """
        --log-max-attention-logit --apply-query-key-layer-scaling --batch-invariant-*""",
    "use --kv-lora-rank, 32 by default in Megatron; --rotary-scaling-factor requires --rope-scaling yarn here": """
        --multi-latent-attention""",
    "latents are computed by one product, and cached by generation: leave it out": """
        --mla-down-proj-fusion --cache-mla-latents""",
    "layers are attention and MLP or experts: leave it out": """
        --hybrid-* --is-hybrid-model --*mamba-* --heterogeneous-* --spec --enable-mhc-connections --mhc-* --onnx-safe
        --use-legacy-models""",
    "the drafting head is one layer of the usual kind on the last stage: leave it out": """
        --mtp-hsm --mtp-hybrid-override-pattern --mtp-standalone""",
    "use --mtp-num-layers 1 with --mtp-depths": "--mtp-use-repeated-layer",
    "learning rates and initial weights are not scaled by widths: leave it out, and choose --lr and --init-method-std "
    "for this width": "--use-mup --mup-*",
    "all matrices start normal, with one --init-method-std, and decay: other choices are not supported": """
        --embedding-init-method-std --init-method-xavier-uniform""",
    "initial weights do not depend on the layout: leave it out": """
        --data-parallel-random-init --use-cpu-initialization --no-initialization --init-model-with-meta-device""",
    "the vocabulary is padded to 128 x tensor-parallel size: leave it out": """
        --padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size""",
    # Experts.
    "use --moe-router-topk; with 1, the default there, add --moe-router-unnormalized": "--topk",
    "use --moe-router-unnormalized with softmax scores, and leave both out with --moe-router-score-function sigmoid, "
    "whose weights it does not change": "--moe-router-pre-softmax",
    "use --moe-aux-loss-coeff with --moe-router-load-balancing-type aux_loss; it is 0.1 by default there, and of two "
    "experts only the first counts": "--moe-loss-coeff",
    "use --num-experts with --moe-router-topk 1 and --moe-router-unnormalized": "--num-experts-switch",
    "use --moe-router-num-groups, with as many groups as expert-parallel ranks, and --moe-router-group-topk": """
        --moe-router-topk-limited-devices""",
    "list the layers in --moe-layers; N stands for 0, N, 2N and so on": "--moe-layer-freq",
    "list the layers in --moe-layers; N, 2 by default there, stands for N-1, 2N-1 and so on": "--expert-interval",
    "use --expert-model-parallel-size": "--moe-expert-parallel-size=1",
    "tensor-parallel ranks divide the width of every expert, without --expert-model-parallel-size: leave it out": """
        --moe-extended-tp --enable-expert-tensor-parallelism --create-moe-param-group""",
    "the weights of experts multiply their outputs: another model is not supported": "--moe-apply-probs-on-input",
    "no token is dropped: leave it out": """
        --moe-token-drop-policy --moe-token-dropping --moe-train-capacity-factor --moe-eval-capacity-factor
        --moe-min-capacity""",
    "no token is dropped: leave it out, or use --moe-expert-capacity for a number of rows": """
        --moe-expert-capacity-factor --moe-expert-rank-capacity-factor --moe-pad-expert-input-to-capacity""",
    "tokens are exchanged by the all-to-all of NCCL or gloo: leave it out": """
        --moe-token-dispatcher-type=alltoall --moe-enable-deepep --moe-deepep-* --moe-flex-* --moe-*hybridep*
        --moe-ncclep-* --moe-dispatch-* --moe-combine-*""",
    "a step computes one micro-batch at a time: leave it out; --residual-mode ladder hides the exchange with one, but "
    "is another model": "--overlap-moe-expert-parallel-comm --ep-overlap-*",
    "the products of experts have one implementation: leave it out": """
        --moe-permute-fusion --moe-router-fusion --moe-use-*grouped* --moe-single-grouped-* --use-grouped-gemm-*
        --use-tutel --moe-*interleave-size --moe-*paged-stash*
        --moe-pad-experts-for-cuda-graph-inference --moe-router-padding-for-*""",
    "docs/moe.md describes the experts": """
        --moe-latent-size --moe-input-jitter-eps --moe-router-force-*
        --moe-router-quantile-* --moe-enable-routing-replay --moe-routing-trace-* --moe-per-layer-logging
        --moe-use-upcycling --moe-upcycling-*""",
    # Precision.
    "use --bf16": """
        --fp16 --fp16-* --*fp8-* --*fp4-* --first-last-layers-bf16 --num-layers-at-*-in-bf16
        --te-precision-config-file --kitchen-* --use-kitchen-attention""",
    "fp32 and --bf16 need no scale of the loss: leave it out": """
        --loss-scale --initial-loss-scale --min-loss-scale --min-scale --loss-scale-window --hysteresis""",
    "products and random numbers are those of torch: leave it out": """
        --te-rng-tracker --disable-bf16-reduced-precision-matmul""",
    "masters, moments and gradients are fp32: leave it out": """
        --main-grads-dtype=fp32 --main-params-dtype=fp32 --exp-avg-dtype=fp32 --exp-avg-sq-dtype=fp32
        --grad-reduce-in-bf16 --use-precision-aware-optimizer --output-logit-dtype""",
    # Processes and communication.
    "use --tensor-model-parallel-size with --sequence-parallel, and where activations still do not fit "
    "--recompute-granularity full, which takes a third more computation": """
        --context-parallel-size=1 --cp=1 --ds-sequence-parallel-size=1 --hybrid-context-parallel
        --force-ds-sequence-parallel --ds-sequence-parallel-fpdt*""",
    "no context-parallel ranks divide sequences: leave it out": """
        --cp-comm-type --hierarchical-context-parallel-sizes --max-seqlen-per-dp-cp-rank""",
    "use --tensor-model-parallel-size": "--model-parallel-size",
    "ranks that use the same weights divide them only with --zero-stage 3": """
        --tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-*""",
    "use --num-layers-per-virtual-pipeline-stage: --num-layers divided by --pipeline-model-parallel-size and by this "
    "number": "--num-virtual-stages-per-pipeline-rank",
    "the schedules are 1F1B and interleaved 1F1B: leave it out": """
        --enable-zbh1-* --microbatch-group-size-per-virtual-pipeline-stage --*overlap-p2p-communication*
        --use-ring-exchange-p2p --no-scatter-gather-tensors-in-pipeline --pipeline-model-parallel-comm-backend
        --defer-embedding-wgrad-compute --wgrad-deferral-limit --*align-grad-reduce --*align-param-gather""",
    "numbers of layers cannot be given: use --pipeline-partition parameters, which gives stages with embedding or "
    "output head fewer": """
        --pipeline-model-parallel-layout --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
        --account-for-*-in-pipeline-split --standalone-embedding-stage""",
    "there is no encoder: leave it out": """
        --pipeline-model-parallel-split-rank --encoder-tensor-model-parallel-size
        --encoder-pipeline-model-parallel-size""",
    "--zero-stage 1, the default, reduces gradients under backward and gathers weights under forward: leave it out": """
        --use-distributed-optimizer! --overlap-grad-reduce! --overlap-param-gather! --no-use-layer-wise-param-layout
        --overlap-param-gather-with-optimizer-step --delay-param-gather --no-delay-grad-reduce --ddp-*
        --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp --no-gradient-reduce-div-fusion
        --create-all-gather-group""",
    "set reduce_bucket_size in the file of --deepspeed_config": "--ddp-bucket-size",
    "use --zero-stage 3": "--use-torch-fsdp2 --*fsdp*",
    "use --zero-stage: 0 for no_shard, 1 for optim, 2 for optim_grads, 3 for optim_grads_params": """
        --data-parallel-sharding-strategy""",
    "all data-parallel ranks shard together: leave it out": """
        --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp --suggested-communication-unit-size""",
    "set it in the file of --deepspeed_config": """
        --zero-allgather-bucket-size --zero-reduce-bucket-size --zero-reduce-scatter --zero-contigious-gradients""",
    "use --offload-optimizer cpu": """
        --cpu-optimizer --cpu-torch-adam --optimizer-cpu-offload --offload-optimizer-states""",
    "--offload-optimizer cpu takes the whole optimizer, and torch's AdamW: leave it out": """
        --optimizer-offload-fraction=1 --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d
        --no-pin-cpu-*""",
    "weights stay on the device: use --zero-stage 3, and --offload-optimizer cpu for the optimizer": """
        --remote-device=none --use-pin-memory""",
    "no product is cut to hide its sum: leave it out; --residual-mode ladder hides sums, but is another model": """
        --*tp-comm-bulk-* --*tp-comm-split-* --*tp-comm-overlap* --tp-comm-bootstrap-backend""",
    "the results are the same: leave it out; --no-tp-overlap waits for every all-reduce, for comparison": """
        --no-async-tensor-model-parallel-allreduce""",
    "use --residual-mode parallel": "--parallel-attn-mlp",
    "use --tp-comm-max-ctas, and the environment variables of NCCL": """
        --nccl-* --use-nccl-ub --use-sharp --sharp-enabled-group --disable-symmetric-registration""",
    "tensor- and data-parallel groups have priority, and sums of generation use symmetric memory: leave it out": """
        --high-priority-stream-groups --symmetric-ar-type""",
    "memory is freed without it: leave it out": """
        --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding""",
    "use --distributed-timeout-seconds-after-first-step": "--distributed-timeout-seconds-after-init",
    "use the environment variables of torch's flight recorder": "--*flight-recorder-*",
    "the launcher starts the ranks, in the order of tensor, data and pipeline: leave it out": """
        --use-tp-pp-dp-mapping --lazy-mpu-init --disable-gloo-process-groups --fake-process-group
        --initialize-socket-comms""",
    "it is a flag of the launcher: give it before pretrain_ladder.py": """
        --nproc-per-node --nnodes --node-rank --num-gpus --num-nodes --hostfile --master-addr --master-port
        --rdzv-*""",
    # Batches, steps and the optimizer.
    "lengths are counted in steps of --global-batch-size samples of --seq-length tokens: use --train-iters, "
    "--lr-decay-iters, --lr-warmup-iters and --lr-wsd-decay-iters": """
        --train-samples --train-tokens --lr-decay-samples --lr-warmup-samples --lr-decay-tokens --lr-warmup-tokens
        --lr-wsd-decay-samples""",
    "use --lr-warmup-iters": "--warmup --warmup-steps --num-warmup-steps",
    "use --lr-warmup-iters: this part of --lr-decay-iters, which is --train-iters by default": """
        --lr-warmup-fraction --warmup-ratio""",
    "the warm-up starts at 0: leave it out": "--lr-warmup-init=0",
    "use --global-batch-size": "--train-batch-size",
    "use --global-batch-size: this number x --micro-batch-size x data-parallel processes": """
        --gradient-accumulation-steps""",
    "a run has one --global-batch-size: use several runs, which resume with --load and another one": """
        --rampup-batch-size --step-batch-size-schedule --phase-transition-iterations""",
    "a --global-batch-size that the processes cannot divide is an error: leave it out": """
        --decrease-batch-size-if-needed""",
    "use --micro-batch-size": "--batch-size --per-device-train-batch-size",
    "use --lr": "--learning-rate --max-lr",
    "embedding and output head have the --lr and --min-lr of the layers: leave it out, which trains them otherwise": """
        --decoupled-lr --decoupled-min-lr""",
    "use --lr-decay-style, whose default is cosine": "--lr-scheduler-type",
    "use --clip-grad": "--max-grad-norm --gradient-clipping",
    "use --train-iters": "--max-steps",
    "use --train-iters; the start of a run prints how many epochs they are": """
        --num-train-epochs --train-data-exact-num-epochs""",
    "one --weight-decay holds for the whole run and all matrices, and none for norms and biases": """
        --start-weight-decay --end-weight-decay --weight-decay-incr-style=constant --apply-wd-to-qk-layernorm
        --no-weight-decay-cond-type""",
    "use --optimizer adamw or muon, which train otherwise": "--sgd-momentum --lion-*",
    "all parameters are trained, except from Python those whose requires_grad is False: leave it out": """
        --dump-param-to-param-group-map --freeze-all-layers""",
    "torch's fused AdamW runs on GPUs: leave it out": "--ds-fused-adam --optimizer-cuda-graph",
    "it is the default of --optimizer muon: leave it out": "--muon-use-nesterov",
    "use --muon-scale-mode match_rms_adamw for spectral with a factor of 0.2, or original for shape_scaling": """
        --muon-extra-scale-factor=1""",
    "the coefficients are those of simple: leave it out": "--muon-coefficient-type=simple",
    "whole matrices are orthogonalised, q, k and v separately: leave it out": """
        --muon-no-split-qkv --muon-tp-mode=duplicated,distributed --muon-use-syrk --muon-fp32-matmul-prec""",
    "AdamW updates what Muon does not: leave it out": "--muon-scalar-optimizer=adam",
    "steps cannot be listed: use --loss-spike-factor with --skip-loss-spikes, which skip the update of steps with a "
    "large loss": "--iterations-to-skip",
    "use --loss-spike-factor 10, Megatron's factor": "--check-for-spiky-loss",
    "gradients are clipped to --clip-grad, 1 by default: leave it out": "--check-for-large-grads",
    "a step with non-finite numbers is skipped: use --max-consecutive-bad-steps": """
        --no-check-for-nan-in-loss-and-grad --rerun-mode --result-rejected-tracker-filename""",
    # Memory and kernels.
    "use --recompute-granularity full": "--checkpoint-activations --deepspeed-activation-checkpointing",
    "use --sequence-parallel, which shards what --recompute-granularity full stores": """
        --distribute-saved-activations --distribute-checkpointed-activations --partition-activations""",
    "what the backward pass needs is stored on the device, or recomputed with --recompute-granularity full: leave it "
    "out": """
        --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer --memory-centric-tiled-linear
        --tile-factor --split-transformers --scattered-embeddings --mlp-chunks-for-*""",
    "no scores of attention are stored, and other parts are recomputed only together: leave it out, or use "
    "--recompute-granularity full, which takes a third more computation": """
        --moe-layer-recompute --recompute-modules=core_attn""",
    "activations stay on the device: leave it out, or use --recompute-granularity full, which stores fewer and takes a "
    "third more computation": """
        --*-activation-offloading --cpu-offloading-* --fine-grained-* --offload-modules --activation-offload-fraction
        --min-offloaded-tensor-size --delta-offload-bytes-across-pp-ranks --delay-offload-until-cuda-graph""",
    "--recompute-granularity full recomputes all layers: leave it out, and for uniform --recompute-num-layers, too, "
    "which counts layers of the whole model here; Megatron's block counts those of each stage": """
        --recompute-method --activations-checkpoint-method --activations-checkpoint-num-layers""",
    "--recompute-granularity full recomputes all layers, one sub-block at a time: leave it out": """
        --checkpoint-num-layers""",
    "graphs are captured on GPUs where they are faster: leave it out, or use --cuda-graph": """
        --cuda-graph-* --enable-cuda-graph --external-cuda-graph""",
    "use --compile-sub-blocks false": "--disable-jit-fuser",
    "attention and cross entropy never store their matrices, with kernels of torch: leave it out": """
        --flash-attention-version --use-flash-attn-builder --use-flash-attn-triton --use-flash-attn-v1
        --cross-entropy-fusion-impl --use-transformer-engine-op-fuser --no-scaled-masked-softmax-fusion
        --scaled-upper-triang-masked-softmax-fusion""",
    "the trainer does not control Python's garbage collector, nor how far the host runs ahead: leave it out": """
        --*manual-gc* --train-sync-interval""",
    # Data and tokenizers.
    "data is memory-mapped and needs no workers: leave it out": """
        --num-workers --no-mmap-bin-files --mmap-warmup --exit-signal-handler-for-dataloader
        --dataloader-defer-npy-index-mmap --no-data-sharding --repeated-dataloader""",
    "the order of samples is computed at the start and not stored: leave it out": """
        --data-cache-path --object-storage-cache-path --s3-cache-path --dataloader-fast-cache-load
        --num-dataset-builder-threads --mid-level-dataset-surplus --per-dataset-sequences-path --train-*idx-path
        --train-desc-path --return-data-index --renormalize-blend-weights --aml-data-download-path""",
    "give real data: docs/tutorial.md creates some": "--mock-data",
    "training does not read test data: evaluate it with --load DIR --skip-train --valid-data-path": "--test-data-path",
    "list data sets under data_path, or train_data_path and valid_data_path, in a file for --config": """
        --data-args-path --per-split-data-args-path""",
    "name the sets in --valid-data-path": "--multiple-validation-sets --validation-set-names",
    "use --eval-iters and --eval-interval; evaluation uses the batches of training": """
        --full-validation --start-eval-at-iter --eval-micro-batch-size --eval-global-batch-size""",
    "use --tokenizer-type HuggingFaceTokenizer with GPT-2's tokenizer.json, which holds both files": """
        --vocab-file --merge-file""",
    "use --tokenizer-type and --tokenizer-model; no code of a tokenizer runs": """
        --tokenizer-hf-* --tokenizer-sentencepiece-* --*-tokenizer-sentencepiece-* --tokenizer-metadata
        --legacy-tokenizer --use-gigatoken --tiktoken-* --trust-remote-code
        --*use-tokenizer-model-from-checkpoint-args""",
    "special tokens are those of the tokenizer's files, and --eod-token names the one that ends documents": """
        --tokenizer-special-tokens""",
    "the NullTokenizer ends documents with the id --vocab-size: leave it out": "--null-tokenizer-*",
    "--eod-mask-loss and --loss-on choose the labels, not a padding token: leave it out": """
        --allow-ambiguous-pad-tokens""",
    "checkpoints hold the tokenizer: leave it out": "--*save-tokenizer-assets",
    "preprocess conversations with preprocess_data.py --chat": "--sft --sft-*",
    "preprocess conversations with preprocess_data.py --chat --chat-template": "--chat-template",
    "texts are read as they are: leave it out": "--fim-* --data-efficiency-curriculum-learning --random-ltd",
    # Checkpoints.
    "use --save": "--output-dir",
    "use --load": "--resume-from-checkpoint",
    "use --load DIR --finetune for the first start, and --load with the directory of --save for later ones": """
        --pretrained-checkpoint""",
    "--finetune starts at iteration 0, with a new optimizer": "--reset-iteration",
    "a run continues at the iteration of its checkpoint: give --load an earlier one, as in --load DIR/iter_0000100": """
        --override-ckpt-iteration""",
    "give the checkpoint's directory to --load, as in --load DIR/iter_0000100": "--ckpt-step --load-tag",
    "checkpoints are complete: leave state out on loading, with --finetune, --no-load-optim or --no-load-rng": """
        --no-save-optim --no-save-rng""",
    "use --override-opt-param-scheduler": "--override-lr-scheduler",
    "the learning rate follows from the iteration: use --override-opt-param-scheduler for another schedule, or "
    "--finetune to start at iteration 0": "--no-load-lr-state",
    "use --use-checkpoint-opt-param-scheduler": "--use-checkpoint-lr-scheduler",
    "use --async-save": "--async-ckpt-* --async-strategy --use-persistent-ckpt-worker",
    "use --save-interval": "--save-steps --persistent-save-interval",
    "use --save-interval with --keep-last-n-checkpoints and --save-retain-interval": "--non-persistent-*",
    "the only files of a run are its checkpoints, record and curves: leave it out": """
        --replication --replication-* --save-activations-interval --save-dgrads-interval --save-wgrads-interval
        --save-params-interval --save-tokens-per-expert-interval""",
    "checkpoints have one format, which any layout writes in parallel, checks and loads: leave it out": """
        --*ckpt-* --use-dist-ckpt --distrib-optim-* --universal-checkpoint --use-mp-args-from-checkpoint-args
        --verify-integrity --load-model-opt-format""",
    "import it with `tools/convert_checkpoint.py import`, and use --load": "--model-name-or-path",
    # Logs, profiles, restarts.
    "use --log-interval": "--logging-steps --tensorboard-log-interval --log-memory-interval",
    "use --eval-interval": "--eval-steps",
    "losses, learning rate, gradient norm, speed and memory are logged, and events in run.jsonl: leave it out": """
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-world-size-to-tensorboard --log-params-norm
        --log-num-zeros-in-grad --log-optimizer-states-to-tensorboard --log-progress --log-energy
        --log-device-memory-used --no-log-learnig-rate-to-tensorboard --logging-level --tensorboard-queue-size
        --timing-log-option --no-barrier-with-level-1-timing --config-logger-dir --*one-logger* --app-tag-* --otel-*
        --log-straggler --*straggler-* --run-workload-inspector-server --gpu-sniff-test-interval
        --check-weight-hash-across-dp-replicas-interval""",
    "set the environment variable WANDB_ENTITY": "--wandb-entity",
    "use --profile": "--nvtx-ranges --record-shapes --pytorch-profiler-* --profile-backward",
    "the log has the memory of each rank, and no history of it: leave it out": """
        --record-memory-history --memory-snapshot-path""",
    "use --profile-step-start and --profile-step-end": "--profile-steps",
    "docs/reliability.md describes restarts": """
        --inprocess-* --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters --error-injection-*
        --fault-injector-*""",
    "use --kill-switch-file or --exit-duration-in-mins": "--adlr-autoresume --adlr-autoresume-interval",
    "use --config": "--yaml-cfg",
    # Distillation, and what the trainer is not for.
    "use --distill-from": "--load-teacher --kd --mos --logits-*",
    "the teacher's checkpoint has its sizes: leave it out, and use --distill-from": "--*-teacher",
    "use --distill-weight: b / (1 + b) of --kd-beta-ce b, which leaves the cross entropy a weight of 1": "--kd-beta-ce",
    "the weight of the cross entropy is 1 less --distill-weight: leave it out": "--kd-alpha-ce",
    "use --distill-temperature": "--kd-temp",
    "use tools/generate.py": """
        --inference --inference-* --no-inference-* --ds-inference --*chunked-prefill --decode-only-cuda-graphs
        --flash-decode --max-tokens-to-oom --num-speculative-tokens --use-same-sampling-seed-across-dp-ranks
        --use-legacy-static-engine --nccl-all-reduce-for-prefill""",
    "only decoders of text are trained: leave it out": """
        --vision-* --dino-* --swin-* --img-* --patch-dim --num-channels --num-classes --classes-fraction --mask-*
        --data-per-class-fraction --head-lr-mult --iter-per-epoch --bert-* --output-bert-embeddings
        --short-seq-prob --retro-* --biencoder-* --ict-* --block-data-path --embedding-path --evidence-data-path
        --titles-data-path --indexer-* --query-in-block-prob --retriever-* --use-one-sent-docs
        --*report-topk-accuracies --faiss-use-gpu""",
    "reinforcement learning is not implemented: leave it out": """
        --rl-* --no-rl-* --perform-rl-step --grpo-* --langrl-* --refit-method""",
    "it has no meaning here: leave it out": """
        --enable-experimental --enable-msc --disable-msc --use-dataset-only --test-mode""",
}
"""Reason for a rejection -> flags, which are separated by spaces. `--flag!` is a switch that is accepted, `--flag=a,b`
is accepted with one of these values, and `*` stands for any text. Of several rules for a flag, the first one with its
exact name applies, or else the first one with a `*`."""
_PREPROCESSING_RULES = {
    "documents get no BOS, in training or here: leave it out": "--append-bos",
    "a document is one text, with its line ends: leave it out": "--split-sentences --keep-newlines --lang",
    "use --workers, which keep the order of documents": """
        --partitions=1 --keep-sequential-samples! --find-optimal-num-workers --workers-to-check""",
    "training maps this one format: leave it out": "--dataset-impl=mmap",
}
"""The same for Megatron's preprocess_data.py."""


_EXCLUDED = {
    "--swiglu": ("quick_geglu",),
    "--untie-embeddings-and-output-weights": ("tie_embeddings",),
    "--disable-bias-linear": ("add_attention_output_bias", "add_mlp_bias", "add_moe_bias"),
    "--use-distributed-optimizer": ("zero_stage 0",),
    "--overlap-grad-reduce": ("offload_optimizer cpu", "zero_stage 0", "zero_stage 2", "zero_stage 3"),
    "--overlap-param-gather": ("offload_optimizer cpu", "zero_stage 0", "zero_stage 2", "zero_stage 3"),
    # In Megatron, it replaces `full`.
    "--recompute-activations": ("recompute_granularity full",),
    "--no-pipeline-parallel": ("pipeline_model_parallel_size",),
}
"""Flags of the trainer that contradict accepted ones."""
_REQUIRED = {
    "--group-query-attention": ("num_query_groups",),
    "--use-checkpoint-args": ("load",),
    "--moe-shared-expert-overlap": ("expert_model_parallel_size",),
    "--delay-wgrad-compute": ("expert_model_parallel_size",),
    "--overlap-dispatch-backward-with-experts-wgrad": ("expert_model_parallel_size",),
    "--high-priority-a2a-comm-stream": ("expert_model_parallel_size",),
}
"""Flags without which accepted ones have no meaning."""


@functools.cache
def _known_flags(preprocessing: bool = False) -> tuple[dict[str, tuple[str, tuple[str, ...] | None]], dict[str, str]]:
    """Return reason and accepted values by flag, and reason by pattern.

    A switch has no values; None instead of values: the flag is never accepted.
    """
    exact = dict[str, tuple[str, tuple[str, ...] | None]]()
    patterns = dict[str, str]()
    for reason, words in (_PREPROCESSING_RULES if preprocessing else _RULES).items():
        for word in words.split():
            name, equals, values = word.removesuffix("!").partition("=")
            accepted: tuple[str, ...] | None = None
            if equals:
                accepted = tuple(values.split(","))
            elif word.endswith("!"):
                accepted = ()
            if "*" in name:
                patterns[name] = reason
            else:
                exact[name] = reason, accepted
    return exact, patterns


def read_megatron_flag(name: str, values: Sequence[str], settings: Settings, preprocessing: bool = False) -> bool:
    """Accept a flag of Megatron with its values, or add a problem to the settings; return whether it is Megatron's.

    `preprocessing` selects the flags of Megatron's preprocess_data.py.
    """
    flag = name.replace("_", "-")
    field_name = keyword_name(flag)
    found = {field_name: " ".join(values) or None}
    exact, patterns = _known_flags(preprocessing)
    family = next((pattern for pattern in patterns if fnmatchcase(flag, pattern)), None)
    if flag in exact:
        reason, allowed = exact[flag]
    elif family is not None:
        reason = patterns[family]
        allowed = None
    else:
        return False
    fix = re.sub(r"--[a-z][a-z\d-]*(?!\w)", lambda match: f"{{{keyword_name(match[0])}}}", reason)
    if allowed is None:
        settings.problems.append(Problem({field_name: None}, "{} is not supported", fix))
    elif not allowed and values:
        settings.problems.append(Problem(found, "{}: expected no value, or true in a file"))
    elif allowed and (len(values) != 1 or not _matches(values[0], allowed)):
        settings.problems.append(Problem(found, f"{{}}: only {' or '.join(allowed)} is supported", fix))
    else:
        settings.accept(field_name, _REQUIRED.get(flag, ()), _EXCLUDED.get(flag, ()))
    return True


def _matches(value: str, allowed: Sequence[str]) -> bool:
    try:
        return value.lower() in allowed or float(value) in map(float, allowed)
    except ValueError:
        return False
