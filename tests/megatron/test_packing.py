"""Packed documents in every form that verl and miles use, against the documents without padding."""

import pytest

from .agreement import require_close_gradients, require_close_logits, require_equal_logits
from .packed_batch import PackedBatch
from .process_pool import Layout
from .test_hf_parity import RUN, tokens
from .test_layouts import NOISE

LENGTHS = (37, 50, 1, 3, 64, 5)
DOCUMENTS = [tokens(length, seed=13)[0] for length in LENGTHS]


@pytest.fixture(scope="module")
def unpadded(pool, checkpoints):
    """One process, one document after another without padding."""
    (answer,) = pool.run(RUN, Layout(), checkpoint=str(checkpoints(4)), batches=[PackedBatch(DOCUMENTS)], margins=True)
    return answer


def test_choices_of_these_tests_are_clear_of_rounding(unpadded):
    assert NOISE < unpadded["margins"]["router"] < float("inf")
    assert NOISE < unpadded["margins"]["indexer"] < float("inf")


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, world=2)], ids=str)
@pytest.mark.parametrize(("form", "multiple"), [("verl", 2), ("verl", 8), ("miles", 4), ("tail", 48), ("real", 1)])
def test_padding_changes_no_real_token(pool, checkpoints, unpadded, layout, form, multiple):
    batch = PackedBatch(DOCUMENTS, form, multiple)
    answers = pool.run(RUN, layout, checkpoint=str(checkpoints(4)), batches=[batch])
    require_close_logits(answers, unpadded, real={0: batch.real_places()})
    require_close_gradients(answers, unpadded)


def test_packed_documents_cross_a_pipeline(pool, checkpoints, unpadded):
    answers = pool.run(RUN, Layout(pp=2, world=2), checkpoint=str(checkpoints(4)), batches=[PackedBatch(DOCUMENTS)])
    require_equal_logits(answers, unpadded)
    require_close_gradients(answers, unpadded)
