"""Healthy ranges."""

import math

import pytest

from glm5next_plugin.health.metrics import BY_NAME, METRICS, Range


def test_a_closed_range_holds_its_edges():
    assert Range(-0.2, 0.2).holds(-0.2)
    assert Range(-0.2, 0.2).holds(0.2)
    assert not Range(-0.2, 0.2).holds(0.2000001)
    assert not Range(-0.2, 0.2).holds(-0.2000001)


def test_an_open_edge_is_outside():
    assert not Range(0.0, 2e-4, high_open=True).holds(2e-4)
    assert Range(0.0, 2e-4, high_open=True).holds(1.99e-4)
    assert not Range(0.0, None, low_open=True).holds(0.0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_in_no_range(value):
    assert not Range(None, None).holds(value)


@pytest.mark.parametrize(
    ("healthy", "words"),
    [
        (Range(0, 0), "exactly 0"),
        (Range(0.0, 1.0), "0 to 1"),
        (Range(None, 0.01, high_open=True), "below 0.01"),
        (Range(0.0, None, low_open=True), "above 0"),
        (Range(0.3, None), "at least 0.3"),
        (Range(None, None), "finite"),
    ],
)
def test_a_range_reads_as_words(healthy, words):
    assert str(healthy) == words


def test_the_metrics_are_the_columns_of_metrics_jsonl():
    assert [metric.name for metric in METRICS] == [
        "raw_reward",
        "train_rollout_logprob_abs_diff",
        "train_rollout_logprob_abs_diff_max",
        "nonfinite_logprobs",
        "ppo_kl",
        "grad_norm",
        "seconds",
    ]


def test_log_probabilities_must_agree_to_2e_4_in_fp32_and_2e_2_in_bf16():
    metric = BY_NAME["train_rollout_logprob_abs_diff"]
    assert metric.ranges["fp32"].holds(1.9e-4) and not metric.ranges["fp32"].holds(2e-4)
    assert metric.ranges["bf16"].holds(0.019) and not metric.ranges["bf16"].holds(0.021)
    assert metric.mean_ranges["bf16"].holds(0.0099) and not metric.mean_ranges["bf16"].holds(0.01)
