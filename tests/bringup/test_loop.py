"""The loop, with stand-ins for trainer and engine: rows, files, and how a run ends."""

import json
import os
import signal

import pytest

from glm5next_plugin.bringup import loop
from glm5next_plugin.bringup.loop import BringupSettings, run_bringup
from glm5next_plugin.errors import InputError
from glm5next_plugin.health import report
from glm5next_plugin.health.metrics import METRICS

TRAINER = "tests.bringup.stand_ins:StandInTrainer"


@pytest.fixture
def run(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setattr(report, "_plot", lambda *args: "")
    monkeypatch.setattr(loop, "_ENGINE", "tests.bringup.stand_ins:StandInEngine")

    def start(fault=None, on_row=lambda row: None, **settings):
        settings = dict(out=tmp_path / "out", steps=3, learning_rate=1e-3) | settings
        setup = f"tests.bringup.stand_ins:{fault}" if fault else None
        return run_bringup(BringupSettings(**settings), trainer=TRAINER, on_row=on_row, worker_setup=setup)

    return start


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]


def titles(result):
    return [finding.title for finding in result.findings]


def test_a_healthy_run_writes_a_row_a_step_and_a_report(run, tmp_path):
    seen = []
    result = run(on_row=seen.append)
    assert result.findings == []
    assert written(tmp_path) == result.rows == seen
    assert [list(row) for row in seen] == [["step", *(metric.name for metric in METRICS)]] * 3
    assert [row["step"] for row in seen] == [1, 2, 3]
    assert "Healthy: 3 steps" in result.report.read_text()
    assert [directory.name for directory in (tmp_path / "out" / "weights").iterdir()] == ["step-3"]


def test_a_row_is_on_disk_before_the_next_step(run, tmp_path):
    run(on_row=lambda row: None if len(written(tmp_path)) == row["step"] else pytest.fail("not flushed"))


def test_the_same_seed_gives_the_same_first_row_and_another_seed_another(run):
    def first(seed):
        row = run(seed=seed, steps=1).rows[0]
        return {name: value for name, value in row.items() if name != "seconds"}

    assert first(0) == first(0) != first(1)


def test_several_ranks_give_the_rows_of_one(run):
    rows = run(tensor_parallel=2, steps=1).rows
    assert rows[0]["raw_reward"] == run(steps=1).rows[0]["raw_reward"]


def test_nan_is_counted_kept_out_of_the_mean_and_ends_the_run_unhealthy(run, tmp_path):
    result = run("nan_for_one_token")
    assert len(result.rows) == 1
    assert result.rows[0]["nonfinite_logprobs"] == 1
    assert result.rows[0]["train_rollout_logprob_abs_diff"] < 1e-6
    assert result.rows[0]["grad_norm"] == 0.5 and result.rows[0]["ppo_kl"] is not None
    assert "nonfinite_logprobs" in titles(result)
    assert written(tmp_path) == result.rows


def test_log_probabilities_that_differ_are_bisected_once(run):
    result = run("one_part_differs")
    assert titles(result)[0] == "step 1: trainer and engine part at layer 2, MoE experts"
    assert titles(result).count("step 2: trainer and engine part at layer 2, MoE experts") == 0
    assert "train_rollout_logprob_abs_diff" in titles(result)
    assert len(result.rows) == 3
    assert "layer 2, MoE experts</td><td>100.0%" in result.report.read_text()


def test_parts_that_agree_leave_definitions_to_suspect(run):
    assert "agree part by part" in titles(run("temperature_half", steps=1))[0]


def test_weights_that_do_not_arrive_are_named_and_end_the_run(run):
    result = run("engine_keeps_old_weights")
    assert titles(result)[0] == "unequal weights after the update of step 1: lm_head.weight"
    assert len(result.rows) == 1


def test_an_import_that_changes_a_tensor_is_named(run):
    assert titles(run("import_rounds", steps=1))[0] == "unequal weights after the import: lm_head.weight"


def test_a_death_of_the_engine_is_one_finding_and_keeps_the_rows(run, tmp_path):
    result = run("engine_dies")
    assert titles(result)[0] == "a process failed"
    assert "the rollout engine died by signal SIGKILL during 'sample'" in result.findings[0].detail
    assert written(tmp_path) == result.rows and len(result.rows) == 1
    assert "Unhealthy after 1 step" in result.report.read_text()


def test_a_refusal_in_a_step_is_a_fault_of_the_run_and_not_of_the_user(run):
    result = run("trainer_refuses_to_export")
    assert titles(result)[0] == "a step failed"
    assert "A_log came as bfloat16" in result.findings[0].detail


def test_ctrl_c_leaves_a_report_of_the_steps_so_far(run, tmp_path):
    def interrupt(row):
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    result = run(on_row=interrupt, steps=100)
    assert result.interrupted
    assert written(tmp_path) == result.rows and len(result.rows) == 2
    assert "Interrupted after 2 steps" in result.report.read_text()


def test_a_new_run_replaces_the_rows_of_an_old_one(run, tmp_path):
    run(steps=2)
    run(steps=1)
    assert len(written(tmp_path)) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(steps=0), "steps is 0; needed: at least 1"),
        (dict(pipeline_parallel=0), "pipeline_parallel is 0; needed: at least 1"),
        (dict(learning_rate=-1.0), "the learning rate is -1.0; needed: 0 or a positive number"),
        (dict(learning_rate=float("nan")), "the learning rate is nan"),
        (dict(dtype="fp16"), "dtype is 'fp16'; needed: one of fp32, bf16"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, message, tmp_path):
    with pytest.raises(InputError, match=message):
        BringupSettings(out=tmp_path, **setting)


def test_a_checkpoint_that_is_not_there_is_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        run(checkpoint=tmp_path / "nowhere")


def test_only_a_long_run_of_the_made_checkpoint_at_its_learning_rate_must_learn(tmp_path):
    assert BringupSettings(out=tmp_path).must_learn
    assert not BringupSettings(out=tmp_path, steps=19).must_learn
    assert not BringupSettings(out=tmp_path, learning_rate=0.0).must_learn
    assert not BringupSettings(out=tmp_path, checkpoint=tmp_path).must_learn
