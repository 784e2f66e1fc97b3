"""Records of several sequences as the rows of a packed batch, and records of several stages as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm5next_plugin.errors import InputError

from .record import ReplayRecord


def packed_choices(
    records: Sequence[ReplayRecord], row: torch.Tensor, cu_seqlens: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Choices of every layer for the tokens of a packed row.

    Args:
        records: one a document, all of the same layers.
        row: token ids of the packed row ``[T]``.
        cu_seqlens: where each document starts and, last, where the row ends; a document may be padded at its end. Rows
            of padding, and documents behind the last record, are left to the model.

    Returns:
        0-based layer -> int32 ``[T, k]``.

    Raises:
        InputError: more records than documents, a record of other layers, longer than its document or of other tokens.
    """
    if not records:
        raise InputError("no record for a packed row; needed: one a document")
    first = records[0]
    if len(records) > len(cu_seqlens) - 1:
        raise InputError(f"{len(records)} {first.kind} records for {len(cu_seqlens) - 1} documents")
    whole = torch.full((int(row.shape[0]), *first.choices.shape[1:]), -1, dtype=torch.int32)
    for document, record in enumerate(records):
        if (record.kind, record.layers) != (first.kind, first.layers):
            raise InputError(
                f"record {document} is of {record.kind} in layers {list(record.layers)}; needed, as the first one: "
                f"{first.kind} in layers {list(first.layers)}"
            )
        start, end, length = cu_seqlens[document], cu_seqlens[document + 1], record.token_ids.shape[0]
        if length > end - start:
            raise InputError(
                f"{record.kind} record {document} has {length} tokens; its document has {end - start} with padding"
            )
        record.require_tokens(row[start : start + length])
        whole[start : start + length] = record.choices.to(torch.int32)
    return {layer: whole[:, place].contiguous() for place, layer in enumerate(first.layers)}


def join_layers(parts: Sequence[ReplayRecord]) -> ReplayRecord:
    """Records of one sequence from several pipeline stages as one.

    Raises:
        InputError: parts of other kinds or tokens, or a layer twice.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.kind != first.kind:
            raise InputError(f"records of {first.kind} and {part.kind}; needed: one kind")
        part.require_tokens(first.token_ids)
    columns = {}
    for part in parts:
        for place, layer in enumerate(part.layers):
            if layer in columns:
                raise InputError(f"layer {layer} is in two {first.kind} records; needed: in one")
            columns[layer] = part.choices[:, place].to(torch.int32)
    layers = tuple(sorted(columns))
    widest = max((part.choices.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    choices = torch.stack([columns[layer] for layer in layers], dim=1).to(widest)
    return ReplayRecord(first.kind, first.token_ids, layers, choices)
