"""Packed rows ``[T, ...]``, padded batches ``[B, L, ...]``, and where in its document each packed token stands.

A document is one sequence; ``cu_seqlens`` int32 ``[N + 1]`` holds where each starts and, last, where the row ends.
Functions that only read tensors (:func:`document_ids`, :func:`positions_in_document`) do not synchronise with the host;
the others read lengths and are for the torch references.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from .validation import ShapeError, check_cumulative


def validate_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check the values of ``cu_seqlens``. Reads them on the host: for references, not for kernels.

    Raises:
        ShapeError: not int32 ``[N + 1]``, not starting at 0, decreasing, or not ending at ``tokens``.
    """
    check_cumulative("packing", "cu_seqlens", cu_seqlens)
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != tokens:
        raise ShapeError(
            f"cu_seqlens goes from {values[0]} to {values[-1]}; needed: from 0 to the number of tokens ({tokens})"
        )
    for document, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ShapeError(
                f"cu_seqlens falls from {start} to {end} at document {document}; needed: no negative length"
            )


def cumulative_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths ``[N]`` (any integer dtype) to ``cu_seqlens`` int32 ``[N + 1]``."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def document_ids(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The document of each packed token: int64 ``[tokens]``."""
    places = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)


def positions_in_document(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The position of each packed token in its document, from 0: int64 ``[tokens]``."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    return places - cu_seqlens[document_ids(cu_seqlens, tokens)]


def spread_rows(rows: torch.Tensor, places: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Rows ``[t, ...]`` at ``places`` (int64 ``[t]``) of a packed row ``[tokens, ...]``, zeros elsewhere.

    ``places`` ``None`` says that the rows are the packed row.

    Raises:
        ShapeError: rows that are not ``tokens``, or a place that is not one of the packed row's.
    """
    if places is None:
        if rows.shape[0] != tokens:
            raise ShapeError(f"{rows.shape[0]} rows came without places; needed: the {tokens} of the packed row")
        return rows
    outside = (places < 0) | (places >= tokens)
    if outside.any():
        raise ShapeError(f"places name token {int(places[outside][0])}; needed: 0 to {tokens - 1}")
    return rows.new_zeros(tokens, *rows.shape[1:]).index_copy(0, places, rows)


def pack(padded: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the real tokens out of a left- or right-padded batch.

    Args:
        padded: ``[B, L, ...]``.
        mask: ``[B, L]``, nonzero at real tokens, which stand next to each other in each row.

    Returns:
        rows ``[T, ...]`` and ``cu_seqlens`` int32 ``[B + 1]``; a row without a token is a document of length 0.

    Raises:
        ShapeError: shapes disagree, or a row has padding between two tokens.
    """
    mask = _padding_mask(padded.shape, mask)
    return padded[mask], cumulative_lengths(mask.sum(1))


def unpack(rows: torch.Tensor, mask: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Inverse of :func:`pack`: packed rows ``[T, ...]`` where ``mask`` ``[B, L]`` is nonzero, ``fill`` elsewhere.

    Raises:
        ShapeError: the mask has padding between two tokens, or another number of tokens than there are rows.
    """
    mask = _padding_mask((*mask.shape, *rows.shape[1:]), mask)
    if int(mask.sum()) != rows.shape[0]:
        raise ShapeError(f"unpack: the mask has {int(mask.sum())} tokens; needed: the {rows.shape[0]} of the rows")
    slots = mask.flatten().nonzero().squeeze(1)
    padded = rows.new_full((mask.numel(), *rows.shape[1:]), fill)
    return padded.index_copy(0, slots, rows).unflatten(0, tuple(mask.shape))


def _padding_mask(shape: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
    if mask.dim() != 2 or tuple(shape[:2]) != tuple(mask.shape):
        raise ShapeError(f"mask has shape {list(mask.shape)}; needed: [B, L] = {list(shape[:2])}")
    mask = mask != 0
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1) if mask.shape[1] else mask.sum(1)
    if (starts > 1).any():
        row = int((starts > 1).nonzero()[0])
        raise ShapeError(f"mask row {row} has padding between tokens; needed: padding on the left or right only")
    return mask


@dataclasses.dataclass(frozen=True)
class PaddedDocuments:
    """Documents of similar length, as one padded batch ``[n, length, ...]``.

    Attributes:
        documents: int64 ``[n]``, which documents of the packed row these are.
        length: the length of the longest of them.
        rows: int64 ``[t]``, their tokens' places in the packed row.
        slots: int64 ``[t]``, the same tokens' places in the flattened batch ``[n * length]``.
    """

    documents: torch.Tensor
    length: int
    rows: torch.Tensor
    slots: torch.Tensor

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Packed rows ``[T, ...]`` to ``[n, length, ...]`` with zeros behind each document."""
        count = self.documents.shape[0]
        padded = rows.new_zeros(count * self.length, *rows.shape[1:])
        return padded.index_copy(0, self.slots, rows.index_select(0, self.rows)).unflatten(0, (count, self.length))


def group_by_length(cu_seqlens: torch.Tensor) -> list[PaddedDocuments]:
    """Split the documents into groups whose lengths are within a factor of two, so that padding stays bounded.

    Depends on the lengths alone: the content of one document never changes how another is computed. Documents of
    length 0 are in no group.
    """
    lengths = cu_seqlens.diff().tolist()
    members: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        if length:
            members.setdefault((length - 1).bit_length(), []).append(document)
    groups = []
    for _, documents in sorted(members.items()):
        longest = max(lengths[document] for document in documents)
        index = torch.tensor(documents, device=cu_seqlens.device)
        places = torch.arange(longest, device=cu_seqlens.device)
        starts, counts = cu_seqlens[index].long().unsqueeze(1), cu_seqlens.diff()[index].unsqueeze(1)
        real = (places < counts).flatten()
        rows = (starts + places).flatten()[real]
        groups.append(PaddedDocuments(index, longest, rows, real.nonzero().squeeze(1)))
    return groups


def ungroup(groups: Sequence[PaddedDocuments], padded: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """Results ``[n, length, ...]``, one a group of :func:`group_by_length`, back to packed rows ``[tokens, ...]``."""
    picked = [batch.flatten(0, 1).index_select(0, group.slots) for group, batch in zip(groups, padded, strict=True)]
    results, order = torch.cat(picked), torch.cat([group.rows for group in groups])
    return results.new_empty(tokens, *results.shape[1:]).index_copy(0, order, results)
