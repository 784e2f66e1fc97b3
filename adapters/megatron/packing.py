"""Between megatron-core's activations ``[s, b, c]`` and the packed rows ``[T, c]`` that the operators take."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def cumulative_lengths(
    packed_seq_params: PackedSeqParams | None, sequence_length: int, batch_size: int, device: torch.device
) -> torch.Tensor:
    """Document boundaries of the packed row, int32 ``[documents + 1]``.

    Without ``packed_seq_params`` every sequence of the batch is one document. With it, a document reaches to the start
    of the next one, so padding behind its tokens belongs to it (nothing looks ahead, so it changes nothing); rows
    behind the last boundary form one more document.

    Raises:
        ValueError: another layout than ``thd``, or packed rows with a batch.
    """
    if packed_seq_params is None:
        return torch.arange(0, (batch_size + 1) * sequence_length, sequence_length, dtype=torch.int32, device=device)
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(f"packed_seq_params.qkv_format is {packed_seq_params.qkv_format!r}; needed: 'thd'")
    if batch_size != 1:
        raise ValueError(f"packed documents came with a batch of {batch_size}; needed: one packed row")
    boundaries = packed_seq_params.cu_seqlens_q_padded
    if boundaries is None:
        boundaries = packed_seq_params.cu_seqlens_q
    end = torch.full((1,), sequence_length, dtype=torch.int32, device=device)
    return torch.cat([boundaries.to(device=device, dtype=torch.int32), end])


def to_packed(hidden: torch.Tensor) -> torch.Tensor:
    """``[s, b, c]`` to ``[b * s, c]``, one sequence after another."""
    s, b, c = hidden.shape
    return hidden.transpose(0, 1).reshape(b * s, c)


def from_packed(rows: torch.Tensor, batch_size: int) -> torch.Tensor:
    """``[b * s, c]`` to a contiguous ``[s, b, c]``."""
    return rows.view(batch_size, rows.shape[0] // batch_size, -1).transpose(0, 1).contiguous()
