"""The rows of the data benchmark, by their names on the command line."""

from megatron_ladder.bench.data_samples import build_index, compatible_bytes, read_samples, refuse_damage
from megatron_ladder.bench.data_speed import tokenizer_shares
from megatron_ladder.bench.data_table import DataRow

DATA_ROWS: dict[str, DataRow] = {
    "tokenizers": tokenizer_shares,
    "samples": read_samples,
    "index": build_index,
    "megatron": compatible_bytes,
    "damage": refuse_damage,
}
"""Run in this order. A row of another file is imported and named here."""
