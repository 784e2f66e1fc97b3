"""Parallel layouts over gloo against one process, fp32."""

import pytest

from .agreement import require_close_gradients, require_close_logits, require_equal_logits
from .process_pool import Layout
from .test_hf_parity import RUN, tokens

FIRST_STAGE_OF_3 = ("num_layers_in_first_pipeline_stage", 3)
FREE_SENT_OUTPUTS = ("deallocate_pipeline_outputs", True)
KEEP_SENT_OUTPUTS = ("deallocate_pipeline_outputs", False)
BATCHES = [tokens(66, seed=seed) for seed in (5, 6)]
# fp32 rounding of the scores, which the choices of this test must clear
NOISE = 2e-6


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
    require_equal_logits(answers, one_process)
    require_close_gradients(answers, one_process)


@pytest.mark.parametrize("layout", [Layout(tp=2, world=2), Layout(ep=2, world=2), Layout(tp=2, pp=2, world=4)], ids=str)
def test_split_tensors_and_experts_agree(pool, checkpoints, one_process, layout):
    answers = pool.run(RUN, layout, checkpoint=str(checkpoints(4)), batches=BATCHES)
    require_close_logits(answers, one_process, limit=1e-5)
    require_close_gradients(answers, one_process)
