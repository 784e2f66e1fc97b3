"""Group relative policy optimisation (DeepSeekMath, 2024) with the clip of DAPO (2025): 0.2 below, 0.28 above."""

from __future__ import annotations

import torch

CLIP_LOW = 0.2
CLIP_HIGH = 0.28
_STD_EPS = 1e-6


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rewards normalised within the samples of a prompt: ``(r - mean) / (std + 1e-6)``, std with Bessel's correction.

    Args:
        rewards: fp32 ``[prompts * group_size]``, the samples of a prompt after one another.
        group_size: samples a prompt, at least 2.

    Returns:
        fp32, the same shape. Exactly 0 in a group whose rewards are all equal.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + _STD_EPS)).flatten()


def clipped_policy_loss(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over tokens of the clipped objective's loss and of ``old - new``.

    Sums, so that a caller that splits a minibatch divides by the tokens of the whole minibatch.

    Args:
        log_probs: fp32 ``[samples, tokens]``, of the policy in training.
        old: fp32 ``[samples, tokens]``, the trainer's before the rollout's first update.
        advantages: fp32 ``[samples]``.
        mask: bool ``[samples, tokens]``; what it leaves out takes no part, NaN included.

    Returns:
        the loss (differentiable) and the KL sum (detached), both fp32 scalars.
    """
    change = torch.where(mask, log_probs - old, 0.0)
    ratio = change.exp()
    advantages = advantages.unsqueeze(1)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    return -torch.where(mask, objective, 0.0).sum(), -change.detach().sum()
