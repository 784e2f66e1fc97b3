"""The comparison of trainer's and engine's log-probabilities, with values worked by hand."""

import math

import pytest
import torch

from glm5next_plugin.health.logprobs import logprob_difference

NAN, INF = math.nan, math.inf


def difference(old, rollout, mask=None):
    old, rollout = torch.tensor(old), torch.tensor(rollout)
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return logprob_difference(old, rollout, mask)


def test_the_mean_is_over_samples_not_over_tokens():
    # sample 1: (0.1 + 0.3) / 2 = 0.2; sample 2: one token, 0.8; a mean over tokens would be 0.4
    found = difference([[-1.0, -2.0], [-1.0, -9.0]], [[-1.1, -1.7], [-1.8, -1.0]], [[True, True], [True, False]])
    assert found.mean == pytest.approx((0.2 + 0.8) / 2)
    assert found.maximum == pytest.approx(0.8)
    assert found.nonfinite == 0


def test_differences_do_not_cancel():
    assert difference([[-1.0, -1.0]], [[-1.5, -0.5]]).mean == pytest.approx(0.5)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_token_that_is_not_finite_is_counted_and_part_of_no_mean(broken, side):
    good, bad = [[-1.0, -1.0], [-2.0, -2.0]], [[-1.5, broken], [-2.0, -2.5]]
    found = difference(bad, good) if side == "trainer" else difference(good, bad)
    assert found.nonfinite == 1
    assert found.mean == pytest.approx((0.5 + 0.25) / 2)
    assert found.maximum == pytest.approx(0.5)


def test_two_equal_infinities_are_no_agreement():
    assert difference([[-INF, -1.0]], [[-INF, -1.0]]).nonfinite == 1


def test_a_sample_without_a_finite_token_does_not_count_as_agreement():
    found = difference([[NAN, NAN], [-1.0, -1.0]], [[-1.0, -1.0], [-1.5, -1.5]])
    assert found.nonfinite == 2
    assert found.mean == pytest.approx(0.5)


def test_no_finite_token_at_all_is_not_a_number_rather_than_zero():
    found = difference([[NAN]], [[-1.0]])
    assert math.isnan(found.mean) and math.isnan(found.maximum) and found.nonfinite == 1


def test_tokens_outside_the_mask_are_not_counted():
    assert difference([[NAN, -1.0]], [[-1.0, -1.0]], [[False, True]]).nonfinite == 0
