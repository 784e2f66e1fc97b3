"""Log-probabilities of given tokens, as trainer and rollout must both define them."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .validation import ShapeError, check_tensor


def token_log_probs_reference(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, vocab_size: int | None = None
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` at the targets, in fp32 from the division on.

    Args:
        logits: ``[T, V]``.
        targets: int64 ``[T]``, each below ``vocab_size``.
        temperature: of the sampling that is described; positive.
        vocab_size: columns from here on are padding and take no part; all columns do if left out.

    Returns:
        fp32 ``[T]``.

    Raises:
        ShapeError: a target outside the vocabulary.
    """
    columns = logits.shape[1] if vocab_size is None else vocab_size
    outside = (targets < 0) | (targets >= columns)
    if outside.any():
        token = int(outside.nonzero()[0])
        raise ShapeError(f"token_log_probs: target {int(targets[token])} at {token}; needed: 0 to {columns - 1}")
    scaled = logits[:, :columns].float() / temperature
    return scaled.gather(1, targets.unsqueeze(1)).squeeze(1) - torch.logsumexp(scaled, dim=1)


def _check(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, vocab_size: int | None = None
) -> None:
    check_tensor("token_log_probs", "logits", logits, "[T, V]", (None, None))
    check_tensor("token_log_probs", "targets", targets, "[T]", (logits.shape[0],), torch.int64)
    if not temperature > 0:
        raise ShapeError(f"token_log_probs: temperature is {temperature!r}; needed: a positive number")
    if vocab_size is not None and not 0 < vocab_size <= logits.shape[1]:
        raise ShapeError(f"token_log_probs: vocab_size is {vocab_size}; needed: 1 to the {logits.shape[1]} columns")


token_log_probs = Operator("token_log_probs", token_log_probs_reference, _check)
