"""The output norm of KDA: RMSNorm over a head, times a sigmoid gate."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .validation import check_tensor


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)`` over the last axis, in fp32 with one rounding, at the end.

    Args:
        x: ``[..., D]``.
        gate: ``[..., D]``, before the sigmoid.
        weight: ``[D]``.
        eps: added to the mean square, inside the root.

    Returns:
        ``[..., D]`` in ``x.dtype``.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised * weight.float() * torch.sigmoid(gate.float())).to(x.dtype)


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check_tensor("gated_rms_norm", "x", x, "[..., D]", (None,))
    check_tensor("gated_rms_norm", "gate", gate, "the shape of x", tuple(x.shape))
    check_tensor("gated_rms_norm", "weight", weight, "[D]", (x.shape[-1],))


gated_rms_norm = Operator("gated_rms_norm", gated_rms_norm_reference, _check)
