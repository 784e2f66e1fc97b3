"""All tokens of some heads instead of some tokens of all heads: what a recurrence needs under context parallel."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import all_to_all

from .packing import PackedTokens


class HeadExchange:
    """Swap tokens for heads over the context parallel ranks, and back.

    Args:
        tokens: where this rank's tokens stand.
        heads: heads that every rank of the group holds for its own tokens; a multiple of the group's size.
    """

    def __init__(self, tokens: PackedTokens, heads: int):
        self.tokens = tokens
        self.group = tokens.group
        self.heads = heads // self.group.size()
        first = self.group.rank() * self.heads
        self.mine = slice(first, first + self.heads)

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows ``[t, heads, d]`` to all packed rows of its heads ``[T, heads / cp, d]``."""
        if self.tokens.order is None:
            return rows
        by_rank = rows.unflatten(1, (self.group.size(), self.heads)).transpose(0, 1)
        received = all_to_all(self.group, by_rank.flatten(0, 1).contiguous())
        return received[self.tokens.order]

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`to_heads`."""
        if self.tokens.order is None:
            return rows
        by_rank = torch.empty_like(rows).index_copy(0, self.tokens.order, rows)
        received = all_to_all(self.group, by_rank.contiguous())
        return received.unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)
