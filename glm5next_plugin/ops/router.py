"""The router: fp32 sigmoid scores, a bias that only chooses, weights of the chosen experts.

:func:`route` is the whole; the parts are public for frameworks that put a replay between choice and weights.
"""

from __future__ import annotations

import torch

from .dispatch import Operator
from .float32 import linear_float32
from .validation import ShapeError, check_tensor


def router_logits_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight^T`` in fp32 from fp32 operands, without TF32.

    Args:
        x: ``[..., h]``.
        weight: ``[E, h]``.

    Returns:
        fp32 ``[..., E]``.
    """
    return linear_float32(x, weight)


def scores_for_choice(logits: torch.Tensor, expert_bias: torch.Tensor) -> torch.Tensor:
    """``sigmoid(logits) + expert_bias`` in fp32, ``[T, E]``; decides which experts, never their weights.

    The biases of the release sit near 7: in bf16 almost every token would choose other experts.
    """
    return torch.sigmoid(logits.float()) + expert_bias.float()


def select_experts(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """The experts with the highest scores ``[T, E]``, highest first: int64 ``[T, top_k]``; ties to the lower id."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def expert_weights(
    logits: torch.Tensor, expert_ids: torch.Tensor, scaling: float, normalise: bool = True
) -> torch.Tensor:
    """Weights of the chosen experts from the logits, bias left out: ``sigmoid / (sum + 1e-20) * scaling``.

    Args:
        logits: ``[T, E]``.
        expert_ids: int64 ``[T, k]``.
        scaling: ``routed_scaling_factor``.
        normalise: ``norm_topk_prob``; without it there is no division.

    Returns:
        fp32 ``[T, k]``.
    """
    weights = torch.sigmoid(logits.float()).gather(-1, expert_ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling


def route_reference(
    logits: torch.Tensor, expert_bias: torch.Tensor, top_k: int, scaling: float, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts by ``sigmoid(logits) + expert_bias`` and weigh them by ``sigmoid(logits)`` alone.

    Args:
        logits: fp32 ``[T, E]``.
        expert_bias: fp32 ``[E]``; has no gradient.
        top_k: experts a token.
        scaling, normalise: as in :func:`expert_weights`.

    Returns:
        weights fp32 ``[T, top_k]`` and experts int64 ``[T, top_k]``, highest score first, ties to the lower id.
    """
    with torch.no_grad():
        expert_ids = select_experts(scores_for_choice(logits, expert_bias), top_k)
    return expert_weights(logits, expert_ids, scaling, normalise), expert_ids


def _check_logits(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor("router_logits", "x", x, "[..., h]", (None,))
    check_tensor("router_logits", "weight", weight, "[E, h]", (None, x.shape[-1]))


def _check_route(
    logits: torch.Tensor, expert_bias: torch.Tensor, top_k: int, scaling: float, normalise: bool = True
) -> None:
    check_tensor("route", "logits", logits, "[T, E]", (None, None), torch.float32)
    check_tensor("route", "expert_bias", expert_bias, "[E]", (logits.shape[1],), torch.float32)
    if not 1 <= top_k <= logits.shape[1]:
        raise ShapeError(f"route: top_k is {top_k}; needed: 1 to the number of experts ({logits.shape[1]})")


router_logits = Operator("router_logits", router_logits_reference, _check_logits)
route = Operator("route", route_reference, _check_route)
