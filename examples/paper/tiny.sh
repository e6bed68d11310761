# Replaces settings.sh for --tiny, in the folder `folder`: this repository's own documents, and bytes as tokens.
# shellcheck shell=bash disable=SC2034,SC2154

tokenizer=(--tokenizer-type ByteTokenizer)
training_texts=("$folder/train.jsonl")
held_out_texts=(README.md CONTRIBUTING.md)
held_out_documents=2
held_out=$folder/held-out
runs=$folder
