"""Context parallel in verl's zigzag layout against one process, fp32: pools straddle the ranks."""

import pytest
import torch

from .agreement import require_close_gradients, require_close_logits
from .packed_batch import PackedBatch
from .process_pool import Layout
from .test_hf_parity import RUN, tokens
from .test_layouts import NOISE

ERROR = "tests.megatron.layout_runs:error_of_forward"
DOCUMENTS = [tokens(length, seed=12)[0] for length in (37, 50, 1, 3, 66)]
LAYOUTS = [
    Layout(cp=2, world=2),
    Layout(cp=4, world=4),
    Layout(cp=2, tp=2, world=4),
    Layout(cp=2, pp=2, world=4),
    Layout(cp=2, ep=2, world=2),
]


@pytest.fixture(scope="module")
def one_process(pool, checkpoints):
    made = {}

    def answer(kpool, batch):
        key = (kpool, isinstance(batch, PackedBatch))
        if key not in made:
            (made[key],) = pool.run(
                RUN, Layout(), checkpoint=str(checkpoints(kpool)), batches=[batch], margins=True, timeout=480
            )
        return made[key]

    return answer


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kpool", [4, 16])
def test_packed_documents(pool, checkpoints, one_process, layout, kpool):
    expected = one_process(kpool, PackedBatch(DOCUMENTS))
    assert NOISE < expected["margins"]["router"] < float("inf")
    assert NOISE < expected["margins"]["indexer"] < float("inf")
    multiple = 2 * layout.cp * layout.tp
    batch = PackedBatch(DOCUMENTS, "verl", multiple)
    # the edge of a piece is the edge of no pool
    assert any(length // (2 * layout.cp) % kpool for length in batch.padded_lengths())
    answers = pool.run(RUN, layout, checkpoint=str(checkpoints(kpool)), batches=[batch])
    require_close_logits(answers, expected, real={0: batch.real_places()})
    require_close_gradients(answers, expected)


@pytest.mark.parametrize("layout", [Layout(cp=2, world=2), Layout(cp=2, tp=2, world=4)], ids=str)
def test_a_batch_without_packing(pool, checkpoints, one_process, layout):
    batch = tokens(72, rows=2, seed=13)
    answers = pool.run(RUN, layout, checkpoint=str(checkpoints(4)), batches=[batch])
    expected = one_process(4, batch)
    require_close_logits(answers, expected)
    require_close_gradients(answers, expected)


def test_a_document_that_ranks_cannot_share_is_refused(pool, checkpoints):
    batch = PackedBatch([torch.zeros(40, dtype=torch.int64), torch.zeros(38, dtype=torch.int64)])
    messages = pool.run(
        ERROR, Layout(cp=2, world=2), checkpoint=str(checkpoints(4)), batch=batch.row()[None, :39], packed=batch
    )
    assert all(
        "document 1 of the packed row has 38 tokens; needed: a multiple of 4 with context_parallel_size 2" in message
        for message in messages
    ), messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_format": "bshd"}, "packed_seq_params.qkv_format is 'bshd'; needed: 'thd'"),
        ({"rows": 2}, "packed documents came with a batch of 2; needed: one packed row"),
    ],
)
def test_packed_parameters_of_another_kind_are_refused(pool, checkpoints, changes, message):
    batch = PackedBatch([tokens(8)[0]])
    row = batch.row().expand(changes.get("rows", 1), -1)
    (found,) = pool.run(
        ERROR,
        Layout(),
        checkpoint=str(checkpoints(4)),
        batch=row,
        packed=batch,
        qkv_format=changes.get("qkv_format", "thd"),
    )
    assert message in found
