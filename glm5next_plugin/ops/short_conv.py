"""The short depthwise causal convolution in front of KDA, with its SiLU."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .packing import document_ids, positions_in_document, validate_cu_seqlens
from .validation import ShapeError, check_cumulative, check_tensor


def short_conv_reference(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, initial_state: torch.Tensor | None = None
) -> torch.Tensor:
    """``silu(sum_w weight[:, w] * x[t - (W - 1) + w])`` within each document, in fp32, rounded once.

    Args:
        x: packed ``[T, C]``.
        weight: ``[C, W]`` or ``[C, 1, W]``; the last tap is the token itself. Computed in fp32 whatever its dtype.
        cu_seqlens: int32 ``[N + 1]``.
        initial_state: ``[N, C, W - 1]``, the inputs before each document, oldest first; zeros if left out.

    Returns:
        ``[T, C]`` in ``x.dtype``.
    """
    tokens = x.shape[0]
    validate_cu_seqlens(cu_seqlens, tokens)
    weight = weight.reshape(weight.shape[0], -1).float()
    width = weight.shape[1]
    positions = positions_in_document(cu_seqlens, tokens).unsqueeze(1)
    wide = x.float()
    earlier = wide.new_zeros(())
    if initial_state is not None:
        state, documents = initial_state.float().transpose(1, 2), document_ids(cu_seqlens, tokens)
    y = wide * weight[:, width - 1]
    for back in range(1, width):
        shifted = torch.nn.functional.pad(wide, (0, 0, back, 0))[:tokens]
        if initial_state is not None:
            slot = (positions.squeeze(1) - back + width - 1).clamp(max=width - 2)
            earlier = state[documents, slot]
        # where, not a product with a mask: nothing of the neighbouring document may pass, not even a NaN
        y = y + torch.where(positions >= back, shifted, earlier) * weight[:, width - 1 - back]
    return torch.nn.functional.silu(y).to(x.dtype)


def short_conv_step_reference(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One new token a sequence.

    Args:
        x: ``[B, C]``.
        state: ``[B, C, W - 1]``, the last inputs, oldest first.
        weight: as in :func:`short_conv`.

    Returns:
        y ``[B, C]`` in ``x.dtype`` and a fresh state in the state's dtype.
    """
    weight = weight.reshape(weight.shape[0], -1).float()
    window = torch.cat([state.float(), x.float().unsqueeze(-1)], dim=-1)
    y = torch.nn.functional.silu((window * weight).sum(-1)).to(x.dtype)
    return y, torch.cat([state[..., 1:], x.unsqueeze(-1).to(state.dtype)], dim=-1)


def _check_weight(operator: str, weight: torch.Tensor, channels: int) -> int:
    if weight.dim() == 3:
        check_tensor(operator, "weight", weight, "[C, 1, W]", (channels, 1, None))
    else:
        check_tensor(operator, "weight", weight, "[C, W]", (channels, None))
    if weight.shape[-1] < 2:
        raise ShapeError(f"{operator}: weight has width {weight.shape[-1]}; needed: at least 2")
    return weight.shape[-1]


def _check(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, initial_state: torch.Tensor | None = None
) -> None:
    check_tensor("short_conv", "x", x, "[T, C]", (None, None))
    width = _check_weight("short_conv", weight, x.shape[1])
    check_cumulative("short_conv", "cu_seqlens", cu_seqlens)
    if initial_state is not None:
        sizes = (cu_seqlens.shape[0] - 1, x.shape[1], width - 1)
        check_tensor("short_conv", "initial_state", initial_state, "[N, C, W - 1]", sizes)


def _check_step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor("short_conv_step", "x", x, "[B, C]", (None, None))
    width = _check_weight("short_conv_step", weight, x.shape[1])
    check_tensor("short_conv_step", "state", state, "[B, C, W - 1]", (*x.shape, width - 1))


short_conv = Operator("short_conv", short_conv_reference, _check)
short_conv_step = Operator("short_conv_step", short_conv_step_reference, _check_step)
