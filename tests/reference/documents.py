"""Megatron's `_get_ltor_masks_and_position_ids`, restated token by token. Shares no code with the package."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.model import Sight


def sight_of(begins: Sequence[Sequence[bool]], reset_positions: bool, reset_mask: bool) -> Sight:
    """Return the visible tokens if documents begin at `begins` [b][s] and at the start of each row."""
    positions, visible = [], []
    for row in begins:
        document, count = 0, 0
        documents: list[int] = []
        of_row: list[int] = []
        for column, is_begin in enumerate(row):
            if is_begin and column > 0:
                document, count = document + 1, 0
            documents.append(document)
            of_row.append(count if reset_positions else column)
            count += 1
        positions.append(of_row)
        visible.append(
            [
                [key <= query and (documents[key] == documents[query] or not reset_mask) for key in range(len(row))]
                for query in range(len(row))
            ]
        )
    return Sight(torch.tensor(positions), torch.tensor(visible))


def begins_after(tokens: Tensor, eod_id: int) -> list[list[bool]]:
    """Return where documents begin in rows [b, s]: after each end-of-document token."""
    return [[False, *(token == eod_id for token in row[:-1])] for row in tokens.tolist()]


def loss_mask_of(tokens: Tensor, eod_id: int) -> Tensor:
    """Return the mask [b, s] of --eod-mask-loss: 0 where the input is an end-of-document token."""
    return torch.tensor([[0.0 if token == eod_id else 1.0 for token in row] for row in tokens.tolist()])
