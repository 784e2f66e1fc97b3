"""Rows to findings."""

import pytest

from glm5next_plugin.health.report import verdict_line
from glm5next_plugin.health.verdict import judge, reward_rise, unhealthy_metrics


def row(step, **changed):
    healthy = dict(
        step=step,
        raw_reward=0.5,
        train_rollout_logprob_abs_diff=1e-6,
        train_rollout_logprob_abs_diff_max=1e-5,
        nonfinite_logprobs=0,
        ppo_kl=0.01,
        grad_norm=0.4,
        seconds=3.0,
    )
    return healthy | changed


def test_a_healthy_run_has_no_findings():
    assert judge([row(1), row(2)], "fp32") == []
    line = verdict_line([row(1), row(2, raw_reward=0.75)], [])
    assert line.startswith("Healthy: 2 steps, every figure in its range; raw_reward went from 0.50 to 0.75.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("raw_reward", 1.2),
        ("raw_reward", -0.1),
        ("train_rollout_logprob_abs_diff", 3e-4),
        ("train_rollout_logprob_abs_diff", None),
        ("train_rollout_logprob_abs_diff_max", 0.6),
        ("nonfinite_logprobs", 1),
        ("ppo_kl", 0.3),
        ("ppo_kl", -0.3),
        ("grad_norm", 0.0),
        ("grad_norm", None),
    ],
)
def test_each_figure_out_of_its_range_is_a_finding_that_names_it_and_the_step(name, value):
    findings = judge([row(1), row(2, **{name: value}), row(3)], "fp32")
    assert [finding.title for finding in findings] == [name]
    assert "1 of 3 steps, first at step 2" in findings[0].detail
    assert findings[0].suspects
    assert verdict_line([row(1)], findings).startswith("Unhealthy")


def test_the_ranges_of_bf16_are_wider():
    assert judge([row(1, train_rollout_logprob_abs_diff=0.008)], "bf16") == []


def test_in_bf16_the_mean_over_the_run_is_judged_too():
    findings = judge([row(step, train_rollout_logprob_abs_diff=0.012) for step in (1, 2, 3)], "bf16")
    assert [finding.title for finding in findings] == ["mean train_rollout_logprob_abs_diff"]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_no_gradient_is_healthy_where_every_sample_got_the_same_reward(reward):
    assert unhealthy_metrics(row(1, raw_reward=reward, grad_norm=0.0), "fp32") == []


def test_the_rise_is_the_last_fifth_against_the_first():
    rows = [row(i, raw_reward=reward) for i, reward in enumerate([0.2, 0.3, *[0.9] * 6, 0.7, 0.8])]
    assert reward_rise(rows) == pytest.approx(0.75 - 0.25)


def test_a_run_that_must_learn_and_does_not_is_a_finding():
    flat = [row(i) for i in range(20)]
    assert [finding.title for finding in judge(flat, "fp32", must_learn=True)] == ["the reward does not rise"]
    assert judge(flat, "fp32") == []


def test_an_interrupted_run_is_called_so():
    assert verdict_line([row(1)], [], interrupted=True).startswith("Interrupted after 1 step;")
