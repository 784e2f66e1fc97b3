"""The Megatron model against the transformers model, both fp32, on one process."""

import pytest
import torch

from . import hf_reference
from .layout_runs import direction
from .packed_batch import PackedBatch
from .process_pool import Layout

LENGTHS = [1, 3, 4, 5, *range(15, 22), 63, 64, 65, 130]
RUN = "tests.megatron.layout_runs:forward_backward"


def tokens(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids below the special tokens: transformers gives the embedding of the padding token no gradient."""
    return torch.randint(0, 119, (rows, length), generator=torch.Generator().manual_seed(1000 * seed + length))


@pytest.mark.parametrize("kpool", [4, 16])
def test_logits_equal_hf_at_every_length(pool, checkpoints, kpool):
    batches = [tokens(length) for length in LENGTHS]
    (answer,) = pool.run(
        RUN, Layout(), checkpoint=str(checkpoints(kpool)), batches=batches, backward=False, margins=True
    )
    assert answer["margins"]["indexer"] < float("inf"), (
        "no pool was ever rejected: the lengths do not test the selection"
    )
    reference = hf_reference.load(checkpoints(kpool))
    with torch.no_grad():
        differences = {
            length: (answer["logits"][i] - hf_reference.logits(reference, batches[i])).abs().max().item()
            for i, length in enumerate(LENGTHS)
        }
    assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize("kpool", [4, 16])
def test_packed_documents_equal_hf_one_by_one(pool, checkpoints, kpool):
    lengths = [37, 50, 1, 3, 64, 4]
    documents = [tokens(length, seed=1) for length in lengths]
    (answer,) = pool.run(
        RUN,
        Layout(),
        checkpoint=str(checkpoints(kpool)),
        batches=[PackedBatch([document[0] for document in documents])],
        backward=False,
    )
    reference = hf_reference.load(checkpoints(kpool))
    with torch.no_grad():
        expected = torch.cat([hf_reference.logits(reference, document) for document in documents], dim=1)
    assert (answer["logits"][0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kpool", [4, 16])
def test_every_gradient_equals_hf(pool, checkpoints, kpool, tmp_path):
    batch = tokens(70, rows=2, seed=2)
    (answer,) = pool.run(RUN, Layout(), checkpoint=str(checkpoints(kpool)), batches=[batch])
    reference = hf_reference.load(checkpoints(kpool))
    output = hf_reference.logits(reference, batch)
    (output * direction(output.shape, 0)).mean().backward()
    expected = hf_reference.gradients(reference, tmp_path)

    # 8 layers of 6 mHC + 2 norms, 6 KDA of 15, 2 DSA of 7 (the indexer is frozen), 3 dense of 3, 5 MoE of 4 + 16 * 3
    assert len(answer["gradients"]) == 8 * 8 + 6 * 15 + 2 * 7 + 3 * 3 + 5 * 52 + 3
    errors = {
        name: ((gradient - expected[name].float()).norm() / expected[name].norm().clamp(min=1e-12)).item()
        for name, gradient in answer["gradients"].items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-3, (worst, errors[worst])
