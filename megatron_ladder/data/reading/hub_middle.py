"""Entering a part of a data set of the `datasets` library in its middle.

The library keeps no index of rows: it makes Arrow tables of a file from its beginning, whatever it is asked for, by
`skip` as by `load_state_dict`. Only Parquet says where rows lie. It is entered at a row group; of other files the rows
before are parsed, but nothing is made of them.
"""

import bisect
import itertools
from typing import Any


def without_first(dataset: Any, rows: int, file: str | None) -> Any:
    """The rest of a data set that is streamed from one file.

    Args:
        rows: to leave out, from the beginning.
        file: path or address of the file, None if nobody knows.
    """
    # Earlier releases of the library cannot tell row groups apart.
    if file is None or not file.endswith(".parquet") or not hasattr(dataset, "reshard"):
        return dataset.skip(rows)
    import datasets
    import fsspec
    import pyarrow.parquet

    with fsspec.open(file) as opened:
        metadata = pyarrow.parquet.read_metadata(opened)
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    begins = [0, *itertools.accumulate(sizes)]
    groups = dataset.reshard()
    if not sizes or groups.num_shards != len(sizes):
        return dataset.skip(rows)
    first = max(0, min(bisect.bisect_right(begins, rows), len(sizes)) - 1)
    entered, *others = (groups.shard(len(sizes), number) for number in range(first, len(sizes)))
    return datasets.concatenate_datasets([entered.skip(rows - begins[first]), *others])
