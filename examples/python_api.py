"""Trains a small ladder model, continues a text with it, and exports it; docs/api.md explains the calls.

python examples/prepare_corpus.py --output-dir corpus --max-megabytes 1
python examples/python_api.py corpus api_run
deepspeed --quiet --num_gpus 2 --no_local_rank examples/python_api.py corpus other_run  # two ranks
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from megatron_ladder.api import TextGenerator, build_model, export_model, import_model, open_training  # noqa: E402

corpus, folder = map(Path, sys.argv[1:3])
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

# A torch module, here for one optimizer step of plain PyTorch.
model = build_model(vocab_size=512, residual_mode="ladder", num_layers=2, hidden_size=64, num_attention_heads=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(512, (4, 65))
loss = model(tokens[:, :-1], tokens[:, 1:]) / (4 * 64)
loss.backward()
optimizer.step()

# A run with everything that pretrain_ladder.py has, of which the script takes the steps.
with open_training(
    residual_mode="ladder",
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    tensor_model_parallel_size=ranks,
    micro_batch_size=8,
    train_iters=20,
    lr=1e-2,
    eval_iters=2,
    tokenizer_type="SentencePieceTokenizer",
    tokenizer_model=corpus / "tokenizer.model",
    train_data_path=corpus / "train_text_document",
    valid_data_path=corpus / "valid_text_document",
    save=folder / "checkpoints",
) as run:
    losses = [run.step().loss for _ in range(20)]
    validation_loss = run.evaluate()
    run.save()

# Text from its checkpoint.
generator = TextGenerator(folder / "checkpoints")
(generation,) = generator.generate("def ", max_new_tokens=20, temperature=0)

# To transformers, and back into a checkpoint, with another wiring for the lower layer.
if rank == 0:
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, validation {validation_loss:.2f}: {generation.text!r}")
    export_model(folder / "checkpoints", folder / "exported")
    import_model(folder / "exported", folder / "hybrid", ladder_layers="1")
