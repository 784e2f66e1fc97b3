"""Trainer's and rollout's log-probabilities of the same tokens, compared."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class LogprobDifference:
    """What :func:`logprob_difference` found.

    Attributes:
        mean: mean over samples of each sample's mean ``|old - rollout|`` over its finite tokens; NaN if there is none.
        maximum: largest ``|old - rollout|`` of a finite token; NaN if there is none.
        nonfinite: tokens of the mask at which either side is NaN or infinite. They are part of no mean.
    """

    mean: float
    maximum: float
    nonfinite: int


def logprob_difference(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> LogprobDifference:
    """miles' ``train_rollout_logprob_abs_diff``, its largest token, and the tokens that it would hide.

    Args:
        old: fp32 ``[samples, tokens]``, the trainer's log-probabilities before the update.
        rollout: fp32 ``[samples, tokens]``, the engine's at sampling.
        mask: bool ``[samples, tokens]``, true on sampled tokens.
    """
    finite = finite_tokens(old, rollout, mask)
    difference = torch.where(finite, (old - rollout).abs(), 0.0)
    counts = finite.sum(1)
    per_sample = difference.sum(1)[counts > 0] / counts[counts > 0]
    return LogprobDifference(
        mean=per_sample.mean().item(),  # of nothing: NaN
        maximum=difference.max().item() if finite.any() else float("nan"),
        nonfinite=int((mask & ~finite).sum()),
    )


def finite_tokens(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask without tokens at which either side is NaN or infinite."""
    return mask & old.isfinite() & rollout.isfinite()
