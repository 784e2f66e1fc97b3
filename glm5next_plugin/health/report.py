"""One HTML page about a run: a verdict that a person understands, then every figure against its healthy range."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from .metrics import METRICS, Metric, Precision
from .verdict import Finding, Row, describe, reward_ends, unhealthy_metrics

_GOOD, _BAD, _PARTIAL = "#1a7f37", "#c62828", "#9a6700"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #1f2328 }
.verdict { color: #fff; padding: .8em 1.2em; border-radius: 8px; font-size: 1.15em }
.finding { border-left: 4px solid #c62828; padding: .2em 1em; margin: 1em 0; background: #fff5f5 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .8em; border: 1px solid #d0d7de }
th { background: #f6f8fa; text-align: left } td.number { text-align: right; font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
figure { margin: 0 } img { width: 100% } figcaption { font-size: .9em; color: #57606a }
.bad { color: #c62828; font-weight: 600 }
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table below the plots, such as the comparison of trainer and engine part by part."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def verdict_line(rows: Sequence[Row], findings: Sequence[Finding], interrupted: bool = False) -> str:
    """The verdict in one sentence."""
    steps = f"{len(rows)} step{'' if len(rows) == 1 else 's'}"
    if findings:
        first, others = findings[0].title, len(findings) - 1
        more = f", and {others} more" if others else ""
        return f"Unhealthy after {steps}: {first}{more}. Do not train with this set-up before that is understood."
    if interrupted:
        return f"Interrupted after {steps}; every figure so far is in its healthy range."
    first, last = reward_ends(rows)
    return (
        f"Healthy: {steps}, every figure in its range; raw_reward went from {first:.2f} to {last:.2f}. "
        "Trainer and rollout engine compute the same model."
    )


def write_report(
    path: Path,
    *,
    settings: Mapping[str, str],
    rows: Sequence[Row],
    findings: Sequence[Finding],
    precision: Precision,
    tables: Sequence[Table] = (),
    interrupted: bool = False,
) -> None:
    """Write the page; it needs no other file and no network.

    Args:
        settings: what the run was, for the table at the end.
        rows: one a step, as :func:`.verdict.judge` takes them.
        findings: what is unhealthy, the most telling first.
        tables: further tables.
        interrupted: whether the run was cut short by its user.
    """
    colour = _BAD if findings else _PARTIAL if interrupted else _GOOD
    parts = [
        f'<p class="verdict" style="background: {colour}">',
        _text(verdict_line(rows, findings, interrupted)),
        "</p>",
        *map(_finding, findings),
        *map(_table, tables),
    ]
    if rows:
        parts += ["<h2>Figures</h2>", _figures(rows, precision), '<div class="plots">']
        parts += [_plot(metric, rows, precision) for metric in METRICS]
        parts.append("</div>")
    parts.append(_table(Table("Run", ("setting", "value"), tuple(settings.items()))))
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>glm5next bringup</title>'
        f"<style>{_STYLE}</style></head><body><h1>glm5next bringup</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def format_value(value: float | None) -> str:
    """A figure for people; ``None`` is one that is not finite."""
    if value is None:
        return "not finite"
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"


def _text(text: str) -> str:
    return html.escape(text)


def _finding(finding: Finding) -> str:
    suspects = "".join(f"<li>{_text(suspect)}</li>" for suspect in finding.suspects)
    body = f"<p>Suspect, the likeliest first:</p><ol>{suspects}</ol>" if suspects else ""
    return f'<div class="finding"><h3>{_text(finding.title)}</h3><p>{_text(finding.detail)}</p>{body}</div>'


def _table(table: Table) -> str:
    header = "".join(f"<th>{_text(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<h2>{_text(table.title)}</h2><table><tr>{header}</tr>{rows}</table>"


def _figures(rows: Sequence[Row], precision: Precision) -> str:
    header = "".join(f"<th>{name}</th>" for name in ("metric", "healthy", "first", "last", "least", "largest", ""))
    lines = []
    for metric in METRICS:
        values = [row[metric.name] for row in rows]
        finite = [value for value in values if value is not None]
        bad = sum(metric.name in unhealthy_metrics(row, precision) for row in rows)
        state = f'<span class="bad">{bad} of {len(rows)} steps outside</span>' if bad else "ok"
        numbers = (values[0], values[-1], min(finite, default=None), max(finite, default=None))
        cells = "".join(f'<td class="number">{format_value(value)}</td>' for value in numbers)
        lines.append(
            f"<tr><td>{metric.name}</td><td>{_text(describe(metric.name, precision))}</td>{cells}<td>{state}</td></tr>"
        )
    return f"<table><tr>{header}</tr>{''.join(lines)}</table>"


def _plot(metric: Metric, rows: Sequence[Row], precision: Precision) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    steps = [row["step"] for row in rows]
    values = [float("nan") if row[metric.name] is None else row[metric.name] for row in rows]
    axes.plot(steps, values, marker=".", color="#0b57d0")
    bad = [i for i, row in enumerate(rows) if metric.name in unhealthy_metrics(row, precision)]
    axes.plot([steps[i] for i in bad], [values[i] for i in bad], linestyle="none", marker="o", color=_BAD)
    for step in (steps[i] for i in bad if rows[i][metric.name] is None):
        axes.axvline(step, color=_BAD, linestyle=":")
    if metric.logarithmic and any(value > 0 for value in values):
        axes.set_yscale("log")
    healthy = metric.ranges.get(precision)
    if healthy is not None:
        low, high = axes.get_ylim()
        for edge in (healthy.low, healthy.high):
            if edge is not None and (edge > 0 or axes.get_yscale() == "linear"):
                axes.axhline(edge, color=_GOOD, linestyle="--", linewidth=1)
                low, high = min(low, edge), max(high, edge)
        inside = (low if healthy.low is None else max(low, healthy.low), high if healthy.high is None else healthy.high)
        axes.axhspan(*inside, color=_GOOD, alpha=0.08)
    axes.set_title(metric.name)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    pyplot.close(figure)
    data = base64.b64encode(image.getvalue()).decode()
    caption = f"{metric.meaning}. Healthy: {describe(metric.name, precision)}."
    return (
        f'<figure><img alt="{metric.name} by step" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption[0].upper() + caption[1:])}</figcaption></figure>"
    )
