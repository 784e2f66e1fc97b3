"""The HTML page."""

import re

from glm5next_plugin.health.metrics import METRICS
from glm5next_plugin.health.report import Table, write_report
from glm5next_plugin.health.verdict import Finding, judge

from .test_verdict import row


def page(tmp_path, rows, **options):
    path = tmp_path / "report.html"
    options = dict(settings={"steps": "2"}, findings=[], precision="fp32") | options
    write_report(path, rows=rows, **options)
    return path.read_text()


def test_every_metric_has_a_plot_and_its_healthy_range(tmp_path):
    text = page(tmp_path, [row(1), row(2)])
    for metric in METRICS:
        assert f'alt="{metric.name} by step"' in text
    assert "0 to 0.0002" in text
    assert text.count("data:image/png;base64,") == len(METRICS)


def test_the_page_needs_nothing_from_outside(tmp_path):
    text = page(tmp_path, [row(1)])
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "http" not in text


def test_findings_stand_on_top_with_their_suspects(tmp_path):
    rows = [row(1, nonfinite_logprobs=3), row(2, train_rollout_logprob_abs_diff=None, grad_norm=None, ppo_kl=None)]
    text = page(tmp_path, rows, findings=judge(rows, "fp32"))
    assert "Unhealthy after 2 steps" in text
    assert text.index("a NaN in the weights") < text.index("<h2>Figures</h2>")
    assert "not finite" in text


def test_text_is_escaped(tmp_path):
    finding = Finding("a <b> & c", "x < y", ("<script>",))
    text = page(tmp_path, [row(1)], findings=[finding], tables=[Table("<t>", ("<h>",), (("<c>",),))])
    assert "<script>" not in text and "<b>" not in text and "<c>" not in text and "<t>" not in text
    assert "a &lt;b&gt; &amp; c" in text


def test_a_run_without_a_step_has_a_page_too(tmp_path):
    assert "Unhealthy after 0 steps: it died" in page(tmp_path, [], findings=[Finding("it died", "at once")])


def test_a_reward_of_zero_and_a_gradient_of_zero_can_be_drawn(tmp_path):
    page(tmp_path, [row(1, raw_reward=0.0, grad_norm=0.0, train_rollout_logprob_abs_diff=0.0)])
