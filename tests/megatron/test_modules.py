"""Single modules and faults that others met, in the Megatron model."""

import math
import subprocess
import sys
from pathlib import Path

import torch

from . import hf_reference
from .process_pool import Layout
from .test_hf_parity import tokens

RUNS = "tests.megatron.module_runs:"
QUICKSTART = Path(__file__).parents[2] / "examples" / "megatron_quickstart.py"


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_every_mlp_clamps_gate_from_above_and_up_on_both_sides(pool, checkpoints):
    (found,) = pool.run(RUNS + "mlp_with_large_preactivations", Layout(), checkpoint=str(checkpoints(4)))
    # (gate, up) = (50, 50), (50, -50), (-50, 50), (3, -2) at limit 10; the gate has no lower bound
    activations = torch.tensor([silu(10.0) * 10, silu(10.0) * -10, silu(-50.0) * 10, silu(3.0) * -2])
    assert sorted(found) == ["dense", "routed", "shared"]
    for name, run in found.items():
        expected = activations.unsqueeze(1) * run["down_rows"]
        assert torch.allclose(run["output"], expected, rtol=1e-4, atol=1e-4), name
        gate, up = run["gradient"].unbind(1)
        assert gate[0] == gate[1] == 0 and up[0] == up[1] == up[2] == 0, name
        assert gate[3] != 0 and up[3] != 0, name


def test_changing_one_document_leaves_the_others_bit_identical(pool, checkpoints):
    (found,) = pool.run(
        RUNS + "documents_after_change",
        Layout(),
        checkpoint=str(checkpoints(4)),
        lengths=[21, 33, 1, 18],
        changed=1,
    )
    start, end = found["boundaries"][1:3]
    for before, after in zip(found["before"], found["after"], strict=True):
        assert torch.equal(before[:start], after[:start])
        assert torch.equal(before[end:], after[end:])
        assert not torch.equal(before[start:end], after[start:end])


def test_idle_experts_get_zero_gradients_and_nothing_hangs(pool, checkpoints):
    answers = pool.run(RUNS + "experts_without_tokens", Layout(ep=2, world=2), checkpoint=str(checkpoints(4)))
    assert all(answer["finite"] for answer in answers)
    gradients = [value for answer in answers for value in answer["gradients"].values()]
    # 5 MoE layers of 16 experts with 2 weights; the one token (the same on both ranks) meets 4 experts a layer
    assert len(gradients) == 5 * 16 * 2
    assert sum(value > 0 for value in gradients) == 5 * 4 * 2
    assert all(math.isfinite(value) for value in gradients)


def test_log_probs_equal_hf_at_another_temperature(pool, checkpoints):
    row = tokens(40, seed=9)
    (found,) = pool.run(RUNS + "log_probs_at", Layout(), checkpoint=str(checkpoints(4)), tokens=row, temperature=0.7)
    reference = hf_reference.load(checkpoints(4))
    with torch.no_grad():
        distribution = torch.log_softmax(hf_reference.logits(reference, row)[0, :-1] / 0.7, dim=-1)
    expected = distribution.gather(1, row[0, 1:, None]).squeeze(1)
    assert (found - expected).abs().max() < 1e-4


def test_padded_vocabulary_takes_no_part_in_log_probs(pool, tmp_path):
    from glm5next_plugin.checkpoint.synthetic import make_checkpoint
    from glm5next_plugin.recipes import variants

    path = make_checkpoint(tmp_path / "odd", variants.tiny(vocab_size=127), dtype="float32")
    row = tokens(20, seed=3) % 100
    (one,) = pool.run(RUNS + "log_probs_at", Layout(), checkpoint=str(path), tokens=row, temperature=1.0)
    two = pool.run(RUNS + "log_probs_at", Layout(tp=2, world=2), checkpoint=str(path), tokens=row, temperature=1.0)
    for found in two:
        assert (found - one).abs().max() < 1e-5


def test_quickstart_is_short_and_runs(checkpoints, tmp_path):
    assert len(QUICKSTART.read_text().splitlines()) <= 20
    result = subprocess.run(
        [sys.executable, str(QUICKSTART), str(checkpoints(4)), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "logits (1, 4, 128)" in result.stdout
    assert (tmp_path / "out" / "config.json").is_file()
