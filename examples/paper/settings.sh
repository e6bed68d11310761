# What depends on the cluster, for the scripts beside this one. Edit the values; paths are the same on all hosts.
# shellcheck shell=bash disable=SC2034

# Names or addresses that all hosts know, rank 0 on the first, and the GPUs of each. Slurm says its own.
hosts="node-1 node-2 node-3 node-4 node-5 node-6 node-7 node-8"
gpus_per_host=8

# StarCoder's tokenizer: the folder with tokenizer.json and tokenizer_config.json of huggingface.co/bigcode/starcoder.
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/starcoder)

# Training texts: hf:// names, streamed, or Parquet or JSON files. 350 billion tokens, of which a run reads 105.
training_texts=(hf://HuggingFaceFW/fineweb-edu:sample-350BT)

# Held-out texts, which must not be among those above: the first documents of a crawl that is later than the sample.
held_out_texts=(hf://HuggingFaceFW/fineweb-edu:CC-MAIN-2024-51)
held_out_documents=30000
held_out=/shared/fineweb-edu-held-out

# Checkpoints and TensorBoard of each run get a folder in this one, on a file system that all hosts share.
runs=/shared/paper
