"""The clamped SwiGLU of every MLP: dense, shared and routed."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .validation import ShapeError, check_tensor


def clamped_swiglu_reference(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; the gradient is zero where a clamp acts.

    The gate has no lower bound: silu vanishes there. silu and the product are each rounded to the input's dtype.

    Args:
        gate_up: ``[..., 2 * I]``, the gate in the first half.
        limit: ``swiglu_limit`` of the config.

    Returns:
        ``[..., I]`` in ``gate_up.dtype``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _check(gate_up: torch.Tensor, limit: float) -> None:
    check_tensor("clamped_swiglu", "gate_up", gate_up, "[..., 2 * I]", (None,))
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"clamped_swiglu: gate_up has {gate_up.shape[-1]} columns; needed: gate and up of one width")
    if not limit > 0:
        raise ShapeError(f"clamped_swiglu: limit is {limit!r}; needed: a positive number")


clamped_swiglu = Operator("clamped_swiglu", clamped_swiglu_reference, _check)
