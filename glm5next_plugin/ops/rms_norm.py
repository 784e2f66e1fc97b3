"""RMSNorm of the blocks, of the latents of DSA and of the final hidden states."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .validation import check_tensor


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    The quotient is computed in fp32 and rounded to ``x.dtype`` before the weight multiplies; the product is rounded
    again.

    Args:
        x: ``[..., h]``.
        weight: ``[h]``.
        eps: added to the mean square, inside the root.

    Returns:
        ``[..., h]`` in ``x.dtype``.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised.to(x.dtype) * weight).to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check_tensor("rms_norm", "x", x, "[..., h]", (None,))
    check_tensor("rms_norm", "weight", weight, "[h]", (x.shape[-1],))


rms_norm = Operator("rms_norm", rms_norm_reference, _check)
