"""Megatron's `_get_ltor_masks_and_position_ids`, said again token by token. Shares no code with the package."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.model import Sight


def sight_of(begins: Sequence[Sequence[bool]], reset_positions: bool, reset_mask: bool) -> Sight:
    """What tokens see when documents begin where `begins` [b][s] says, and at the beginning of a row."""
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
    """Where a document begins in rows [b, s]: after each end-of-document token, which belongs to its document."""
    return [[False, *(token == eod_id for token in row[:-1])] for row in tokens.tolist()]


def loss_mask_of(tokens: Tensor, eod_id: int) -> Tensor:
    """--eod-mask-loss, [b, s]: zero where an end-of-document token is read, so what follows it is not learnt."""
    return torch.tensor([[0.0 if token == eod_id else 1.0 for token in row] for row in tokens.tolist()])
