"""Advantages and loss, with values worked by hand."""

import math

import pytest
import torch

from glm5next_plugin.bringup.grpo import clipped_policy_loss, group_advantages


def loss_of(ratio, advantage, mask=True):
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    loss, kl = clipped_policy_loss(log_probs, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.tensor([[mask]]))
    loss.backward()
    return loss.item(), kl.item(), log_probs.grad.item()


def test_advantages_are_normalised_within_a_group():
    # group 1: mean 0.5, std sqrt(0.5) = 0.7071; group 2: mean 0.25, std 0.3536
    found = group_advantages(torch.tensor([0.0, 1.0, 0.5, 0.0]), group_size=2)
    assert found.tolist() == pytest.approx([-0.70711, 0.70711, 0.70711, -0.70711], abs=1e-4)


def test_a_group_with_equal_rewards_has_no_advantage():
    assert group_advantages(torch.tensor([0.75] * 8 + [0.0] * 8), group_size=8).tolist() == [0.0] * 16


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),  # inside 0.28: the gradient is ratio * advantage
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likelier is not clipped
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_the_objective_is_clipped_at_0_8_and_1_28_on_the_side_that_would_overshoot(ratio, advantage, loss, gradient):
    found, kl, found_gradient = loss_of(ratio, advantage)
    assert found == pytest.approx(loss, rel=1e-5)
    assert found_gradient == pytest.approx(gradient, rel=1e-5)
    assert kl == pytest.approx(-math.log(ratio), abs=1e-6)


def test_sums_run_over_the_tokens_of_the_mask():
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    new = torch.tensor([[-1.0, -1.1, -5.0]])
    mask = torch.tensor([[True, True, False]])
    loss, kl = clipped_policy_loss(new, old, torch.tensor([1.0]), mask)
    assert loss.item() == pytest.approx(-(1.0 + math.exp(-0.1)))
    assert kl.item() == pytest.approx(0.1)


def test_a_masked_nan_reaches_neither_loss_nor_gradient():
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, kl = clipped_policy_loss(
        new, torch.tensor([[-1.0, math.nan]]), torch.tensor([1.0]), torch.tensor([[True, False]])
    )
    loss.backward()
    assert loss.item() == -1.0 and kl.item() == 0.0
    assert new.grad.tolist() == [[-1.0, 0.0]]
