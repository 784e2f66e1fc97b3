"""Rows of metrics to findings: what is unhealthy, since when, and what to suspect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .metrics import BY_NAME, METRICS, Metric, Precision, Range

Row = Mapping[str, float | None]

# mean reward of the last fifth of the steps minus that of the first
LEARNING_RISE = Range(0.3, None)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something unhealthy.

    Attributes:
        title: what, in a few words; names the figure, the tensor or the layer and part.
        detail: the numbers.
        suspects: where to look, the likeliest first.
    """

    title: str
    detail: str
    suspects: tuple[str, ...] = ()


def unhealthy_metrics(row: Row, precision: Precision) -> list[str]:
    """Names of the metrics of one step that are out of range.

    A ``grad_norm`` of 0 is healthy where every sample of the step got the same reward, all or nothing: then there is
    nothing to learn from.
    """
    names = []
    for metric in METRICS:
        healthy = metric.ranges.get(precision)
        if healthy is None or healthy.holds(row[metric.name]):
            continue
        if metric.name == "grad_norm" and row["grad_norm"] == 0 and row["raw_reward"] in (0.0, 1.0):
            continue
        names.append(metric.name)
    return names


def judge(rows: Sequence[Row], precision: Precision, *, must_learn: bool = False) -> list[Finding]:
    """Findings of a run, in the order of :data:`.metrics.METRICS`.

    Args:
        rows: one a step, with a ``step`` and every metric; ``None`` for a figure that is not finite.
        precision: of the run.
        must_learn: whether the reward has to rise (a run that is long enough, on a task that can be learnt).
    """
    findings = []
    for metric in METRICS:
        bad = [row for row in rows if metric.name in unhealthy_metrics(row, precision)]
        if bad:
            findings.append(_out_of_range(metric, bad, len(rows), metric.ranges[precision]))
        mean_range = metric.mean_ranges.get(precision)
        finite = [row[metric.name] for row in rows if row[metric.name] is not None]
        if mean_range is not None and finite and not mean_range.holds(mean := sum(finite) / len(finite)):
            detail = f"mean over {len(finite)} steps {mean:.4g}; healthy: {mean_range}"
            findings.append(Finding(f"mean {metric.name}", detail, metric.suspects))
    if must_learn and not LEARNING_RISE.holds(rise := reward_rise(rows)):
        findings.append(
            Finding(
                "the reward does not rise",
                f"mean raw_reward of the last fifth of the steps minus the first: {rise:+.3f}; "
                f"healthy: {LEARNING_RISE}",
                (
                    "the gradient: frozen or unsynchronised parameters, a graph that is cut",
                    "the sign or the grouping of the advantages",
                    "the weight sync: the engine samples from old weights",
                ),
            )
        )
    return findings


def reward_ends(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean ``raw_reward`` of the first fifth of the steps (at least one) and of the last."""
    fifth = max(1, len(rows) // 5)
    rewards = [row["raw_reward"] for row in rows]
    return sum(rewards[:fifth]) / fifth, sum(rewards[-fifth:]) / fifth


def reward_rise(rows: Sequence[Row]) -> float:
    """By how much the reward rose: the second of :func:`reward_ends` minus the first."""
    first, last = reward_ends(rows)
    return last - first


def _out_of_range(metric: Metric, bad: Sequence[Row], steps: int, healthy: Range) -> Finding:
    values = [row[metric.name] for row in bad]
    nonfinite = sum(value is None for value in values)
    shown = f"{values[0]:.4g}" if values[0] is not None else "not finite"
    detail = f"{len(bad)} of {steps} steps, first at step {bad[0]['step']}: {shown}; healthy: {healthy}"
    if nonfinite and nonfinite < len(bad):
        detail += f"; not finite on {nonfinite} steps"
    return Finding(metric.name, detail, metric.suspects)


def describe(name: str, precision: Precision) -> str:
    """Healthy range of a metric in words, the mean's included."""
    metric = BY_NAME[name]
    ranges = [str(metric.ranges[precision])] if precision in metric.ranges else []
    if precision in metric.mean_ranges:
        ranges.append(f"mean {metric.mean_ranges[precision]}")
    return ", ".join(ranges) or "no range"
