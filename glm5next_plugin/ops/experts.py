"""The routed experts: each token goes through its experts' clamped SwiGLU MLPs."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .swiglu import clamped_swiglu
from .validation import ShapeError, check_tensor

_ROW_BLOCK = 32


def pad_few_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Rows ``[n, h]`` of one expert, filled up with zeros to a multiple of 32; none stay none.

    CPU kernels compute the last rows in another way (few rows of a product, the end of a vectorised loop): in whole
    blocks a token gets the same bits however many others chose its expert.
    """
    return torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[0] % _ROW_BLOCK))


def experts_reference(
    x: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """``sum_j probs[j] * down[e_j] @ clamped_swiglu(gate_up[e_j] @ x)``: the weight applies after ``down``.

    Products with the experts' weights are rounded to ``x.dtype``. Weighing and sum are fp32 in the order of
    ``expert_ids`` with one rounding; transformers adds up in ``x.dtype``, in the order of the experts.

    Args:
        x: ``[T, h]``.
        probs: ``[T, k]``.
        expert_ids: int64 ``[T, k]``, each in ``0..E - 1``.
        gate_up: ``[E, 2 * I, h]``, gate rows first.
        down: ``[E, h, I]``.
        limit: ``swiglu_limit``.

    Returns:
        ``[T, h]`` in ``x.dtype``. The weights of an expert without tokens get a zero gradient.

    Raises:
        ShapeError: an expert id outside ``0..E - 1``.
    """
    count = gate_up.shape[0]
    chosen = expert_ids.flatten()
    outside = (chosen < 0) | (chosen >= count)
    if outside.any():
        raise ShapeError(f"experts: expert id {int(chosen[outside][0])}; needed: 0 to {count - 1}")
    order = torch.argsort(chosen, stable=True)
    rows = torch.div(order, expert_ids.shape[1], rounding_mode="floor")
    counts = torch.bincount(chosen, minlength=count).tolist()
    outputs = []
    for tokens, gate_up_e, down_e in zip(x.index_select(0, rows).split(counts), gate_up, down, strict=True):
        inner = clamped_swiglu(torch.nn.functional.linear(pad_few_rows(tokens), gate_up_e), limit)
        outputs.append(torch.nn.functional.linear(inner, down_e)[: tokens.shape[0]])
    by_slot = torch.cat(outputs).float()
    by_slot = torch.empty_like(by_slot).index_copy(0, order, by_slot).unflatten(0, tuple(expert_ids.shape))
    return (by_slot * probs.float().unsqueeze(-1)).sum(1).to(x.dtype)


def _check(x, probs, expert_ids, gate_up, down, limit) -> None:
    check_tensor("experts", "x", x, "[T, h]", (None, None))
    tokens, hidden = x.shape
    check_tensor("experts", "probs", probs, "[T, k]", (tokens, None))
    check_tensor("experts", "expert_ids", expert_ids, "[T, k]", tuple(probs.shape), torch.int64)
    check_tensor("experts", "gate_up", gate_up, "[E, 2 * I, h]", (None, None, hidden))
    check_tensor("experts", "down", down, "[E, h, I]", (gate_up.shape[0], hidden, None))
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise ShapeError(f"experts: gate_up has {gate_up.shape[1]} rows; needed: 2 * I = {2 * down.shape[2]}")


experts = Operator("experts", experts_reference, _check)
