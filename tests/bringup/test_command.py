"""``glm5next bringup``: exit codes, what it prints, and the demo itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm5next_plugin.bringup import loop
from glm5next_plugin.bringup.loop import BringupResult
from glm5next_plugin.cli.main import app
from glm5next_plugin.errors import InputError
from glm5next_plugin.health.verdict import Finding, reward_rise

from ..health.test_verdict import row


@pytest.fixture
def outcome(monkeypatch, tmp_path):
    """Makes the run end as given; returns what ``glm5next bringup`` then does, and the settings that it passed."""

    def invoke(result, *arguments):
        seen = []

        def run_bringup(settings, *, trainer, on_row, on_stage):
            seen.append(settings)
            if isinstance(result, Exception):
                raise result
            for line in result.rows:
                on_row(line)
            return result

        monkeypatch.setattr(loop, "run_bringup", run_bringup)
        shown = CliRunner().invoke(app, ["bringup", "--out", str(tmp_path), *arguments], env={"COLUMNS": "140"})
        return shown, seen[0] if seen else None

    return invoke


def result(findings=(), interrupted=False, **changed):
    return BringupResult([row(1), row(2, **changed)], list(findings), Path("out/report.html"), interrupted)


def test_a_healthy_run_exits_with_0_and_prints_a_row_a_step(outcome):
    shown, _ = outcome(result(raw_reward=0.8125))
    assert shown.exit_code == 0
    assert "logprob_diff" in shown.output and "0.8125" in shown.output
    assert "Healthy: 2 steps" in shown.output and "report: out/report.html" in shown.output


def test_a_finding_exits_with_1_and_prints_what_to_suspect(outcome):
    shown, _ = outcome(result([Finding("layer 0, KDA attention", "differs", ("beta: b_proj",))], grad_norm=None))
    assert shown.exit_code == 1
    assert "layer 0, KDA attention: differs" in shown.output
    assert "suspect: beta: b_proj" in shown.output
    assert "not finite" in shown.output


def test_an_interrupted_run_exits_with_130(outcome):
    assert outcome(result(interrupted=True))[0].exit_code == 130


@pytest.mark.parametrize("error", [InputError("tp 3 does not divide"), FileNotFoundError("nowhere: no such file")])
def test_what_the_user_can_mend_exits_with_2(outcome, error):
    shown, _ = outcome(error)
    assert shown.exit_code == 2
    assert str(error) in shown.stderr


@pytest.mark.parametrize("arguments", [("--dtype", "fp16"), ("--tp", "0"), ("--steps", "0"), ("--lr", "-1")])
def test_an_option_that_cannot_be_exits_with_2(outcome, arguments):
    shown, settings = outcome(result(), *arguments)
    assert shown.exit_code == 2 and settings is None


def test_every_option_reaches_the_run(outcome):
    options = "--checkpoint ck --steps 7 --seed 3 --lr 0 --dtype bf16 --tp 2 --pp 3 --ep 4".split()
    _, settings = outcome(result(), *options)
    assert (settings.checkpoint, settings.steps, settings.seed) == (Path("ck"), 7, 3)
    assert (settings.learning_rate, settings.dtype) == (0.0, "bf16")
    assert (settings.tensor_parallel, settings.pipeline_parallel, settings.expert_parallel) == (2, 3, 4)


def test_without_options_it_is_the_run_that_must_learn(outcome):
    _, settings = outcome(result())
    assert settings.must_learn and settings.checkpoint is None and settings.dtype == "fp32"


@pytest.mark.timeout(900)
def test_the_demo_learns_and_trainer_and_engine_agree_on_every_step(tmp_path):
    """The command as a newcomer runs it, no argument but the directory, in processes of its own."""
    command = [Path(sys.executable).with_name("glm5next"), "bringup", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, COLUMNS="140"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert reward_rise(rows) >= 0.3
    assert max(line["train_rollout_logprob_abs_diff"] for line in rows) < 2e-4
    assert max(line["nonfinite_logprobs"] for line in rows) == 0
    assert "Healthy: 25 steps" in (tmp_path / "report.html").read_text()
    assert "Healthy: 25 steps" in done.stdout
    assert done.stderr == ""
