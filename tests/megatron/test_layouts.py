"""Parallel layouts over gloo against one process, fp32."""

import pytest
import torch

from .process_pool import Layout
from .test_hf_parity import RUN, tokens

FIRST_STAGE_OF_3 = ("num_layers_in_first_pipeline_stage", 3)
FREE_SENT_OUTPUTS = ("deallocate_pipeline_outputs", True)
KEEP_SENT_OUTPUTS = ("deallocate_pipeline_outputs", False)
BATCHES = [tokens(66, seed=seed) for seed in (5, 6)]
# fp32 rounding of the scores, which the choices of this test must clear
NOISE = 2e-6


def gathered(answers) -> dict[int, torch.Tensor]:
    return {index: logits for answer in answers for index, logits in answer["logits"].items()}


@pytest.fixture(scope="module")
def one_process(pool, checkpoints):
    (answer,) = pool.run(RUN, Layout(), checkpoint=str(checkpoints(4)), batches=BATCHES, margins=True)
    return answer


def test_choices_of_these_tests_are_clear_of_rounding(one_process):
    assert NOISE < one_process["margins"]["router"] < float("inf")
    assert NOISE < one_process["margins"]["indexer"] < float("inf")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, world=2, provider=(FIRST_STAGE_OF_3, FREE_SENT_OUTPUTS)),
        Layout(pp=2, world=2, provider=(FIRST_STAGE_OF_3, KEEP_SENT_OUTPUTS)),
        Layout(pp=4, world=4),
    ],
    ids=str,
)
def test_pipeline_logits_are_bit_identical(pool, checkpoints, one_process, layout):
    answers = pool.run(RUN, layout, checkpoint=str(checkpoints(4)), batches=BATCHES)
    found = gathered(answers)
    assert sorted(found) == [0, 1]
    assert all(torch.equal(found[index], one_process["logits"][index]) for index in found)
    assert_gradients_agree(answers, one_process)


@pytest.mark.parametrize("layout", [Layout(tp=2, world=2), Layout(ep=2, world=2), Layout(tp=2, pp=2, world=4)], ids=str)
def test_split_tensors_and_experts_agree(pool, checkpoints, one_process, layout):
    answers = pool.run(RUN, layout, checkpoint=str(checkpoints(4)), batches=BATCHES)
    found = gathered(answers)
    assert sorted(found) == [0, 1]
    for index, logits in found.items():
        expected = one_process["logits"][index]
        assert (logits - expected).abs().max() / expected.abs().max() <= 1e-5
    assert_gradients_agree(answers, one_process)


def assert_gradients_agree(answers, one_process):
    found, expected = answers[0]["gradients"], one_process["gradients"]
    assert found.keys() == expected.keys()
    errors = {
        name: ((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-20)).item()
        for name, gradient in expected.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-4, (worst, errors[worst])
    for answer in answers:
        assert abs(answer["grad_norm"] / one_process["grad_norm"] - 1) <= 1e-5
