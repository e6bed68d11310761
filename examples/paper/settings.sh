# Settings of the cluster for the scripts in this folder. Edit the values; paths must be the same on all hosts.
# shellcheck shell=bash disable=SC2034

# Names or addresses that all hosts can resolve, rank 0 on the first, and GPUs per host. Slurm jobs use their own.
hosts="node-1 node-2 node-3 node-4 node-5 node-6 node-7 node-8"
gpus_per_host=8

# StarCoder's tokenizer: the folder with tokenizer.json and tokenizer_config.json of huggingface.co/bigcode/starcoder.
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/starcoder)

# Training texts: streamed hf:// names, or Parquet or JSON files. 350 billion tokens, of which a run reads 105 (the paper says 100).
training_texts=(hf://HuggingFaceFW/fineweb-edu:sample-350BT)

# Held-out texts, which must not occur above: the first documents of a crawl that is newer than the sample.
held_out_texts=(hf://HuggingFaceFW/fineweb-edu:CC-MAIN-2024-51)
held_out_documents=30000
held_out=/shared/fineweb-edu-held-out

# Each run writes its checkpoints and TensorBoard files to a subfolder, on a file system that all hosts share.
runs=/shared/paper
