"""The rows of the data benchmark, by their names on the command line."""

from megatron_ladder.lab.bench.data_loop import against_the_loop
from megatron_ladder.lab.bench.data_memory import peak_memory
from megatron_ladder.lab.bench.data_samples import build_index, compatible_bytes, read_samples, refuse_damage
from megatron_ladder.lab.bench.data_speed import tokenizer_shares
from megatron_ladder.lab.bench.data_table import DataRow

DATA_ROWS: dict[str, DataRow] = {
    "tokenizers": tokenizer_shares,
    "loop": against_the_loop,
    "memory": peak_memory,
    "samples": read_samples,
    "index": build_index,
    "megatron": compatible_bytes,
    "damage": refuse_damage,
}
"""Run in this order. A row of another file is imported and named here."""
