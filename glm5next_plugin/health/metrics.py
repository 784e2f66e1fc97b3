"""The metrics of an RL step, each with its healthy range and what to suspect outside it.

``docs/health.md`` explains them at length. Definitions follow miles, so that figures compare with its runs; one differs
on purpose: a log-probability that is not finite is counted, where miles takes it for 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


@dataclasses.dataclass(frozen=True)
class Range:
    """``low <= value <= high``, strict where a side is open; ``None`` is no bound. What is not finite is outside."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float | None) -> bool:
        """Whether ``value`` lies inside; ``None`` stands for a figure that is not finite."""
        if value is None or not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        return self.high is None or value < self.high or (not self.high_open and value == self.high)

    def __str__(self) -> str:
        if self.low is not None and self.low == self.high:
            return f"exactly {self.low:g}"
        if self.low is None and self.high is None:
            return "finite"
        if self.low is None:
            return f"{'below' if self.high_open else 'at most'} {self.high:g}"
        if self.high is None:
            return f"{'above' if self.low_open else 'at least'} {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One column of ``metrics.jsonl``.

    Attributes:
        name: its key.
        meaning: what it says, in one sentence.
        ranges: healthy range of the value of a step; no entry where a step cannot be unhealthy.
        mean_ranges: healthy range of the mean over the steps of a run.
        suspects: where to look when it leaves its range, the likeliest first.
        logarithmic: whether a plot of it needs a logarithmic axis.
    """

    name: str
    meaning: str
    ranges: dict[Precision, Range] = dataclasses.field(default_factory=dict)
    mean_ranges: dict[Precision, Range] = dataclasses.field(default_factory=dict)
    suspects: tuple[str, ...] = ()
    logarithmic: bool = False


def _both(healthy: Range) -> dict[Precision, Range]:
    return dict.fromkeys(PRECISIONS, healthy)


METRICS: tuple[Metric, ...] = (
    Metric(
        "raw_reward",
        "mean reward of the step's samples, before the groups are normalised",
        ranges=_both(Range(0.0, 1.0)),
        suspects=("the reward function", "the samples: right prompts, right answer positions"),
    ),
    Metric(
        "train_rollout_logprob_abs_diff",
        "how far trainer and rollout engine disagree on the log-probability of the sampled tokens (mean over samples)",
        ranges={"fp32": Range(0.0, 2e-4, high_open=True), "bf16": Range(0.0, 0.02)},
        mean_ranges={"bf16": Range(0.0, 0.01, high_open=True)},
        suspects=(
            "the weights: a tensor that was not synced, was rounded, or went to the wrong place",
            "a part of the model that trainer and engine compute differently",
            "the definition of log-probabilities: temperature, padded vocabulary, bf16 logits",
        ),
        logarithmic=True,
    ),
    Metric(
        "train_rollout_logprob_abs_diff_max",
        "the same difference at the one token where it is largest",
        ranges={"fp32": Range(0.0, 0.5), "bf16": Range(0.0, 2.0)},
        suspects=(
            "a choice that flips (router, indexer) on many tokens",
            "a part that goes wrong only for large activations: the clamp of the MLPs",
        ),
        logarithmic=True,
    ),
    Metric(
        "nonfinite_logprobs",
        "how many log-probabilities of sampled tokens were NaN or infinite, in trainer or engine",
        ranges=_both(Range(0, 0)),
        suspects=(
            "a NaN in the weights (checkpoint, or an update with an unbounded gradient)",
            "an overflow: exponentials of the KDA decay, a missing clamp",
            "a row of attention without any key",
        ),
    ),
    Metric(
        "ppo_kl",
        "how far the updates of a step moved the policy: mean of old minus new log-probability per token",
        ranges=_both(Range(-0.2, 0.2)),
        suspects=("the learning rate", "old log-probabilities of other tokens or other weights", "advantages' scale"),
    ),
    Metric(
        "grad_norm",
        "norm of the gradient before clipping, mean over the step's minibatches",
        ranges=_both(Range(0.0, None, low_open=True)),
        suspects=(
            "0: advantages that are all equal, frozen parameters, a graph that is cut",
            "not finite: NaN in activations, an unbounded ratio",
        ),
        logarithmic=True,
    ),
    Metric("seconds", "wall time of the step: rollout, log-probabilities, updates and weight sync"),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
