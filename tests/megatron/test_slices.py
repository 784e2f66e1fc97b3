"""Slices of a checkpoint with the 45 layers of the release run in Megatron as they do in transformers."""

import pytest
import torch

from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants
from tests.command import run_glm5next

from . import hf_reference
from .conftest import INITIALIZATION
from .process_pool import Layout
from .test_hf_parity import tokens

RUN = "tests.megatron.layout_runs:forward_backward"
LENGTHS = [5, 19, 20, 66]  # below, at and above the 19 keys that every query sees


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    architecture = variants.demo(num_hidden_layers=45, first_k_dense_replace=3, vocab_size=128)
    path = tmp_path_factory.mktemp("release") / "checkpoint"
    return make_checkpoint(path, architecture, seed=2, dtype="float32", mtp=True, init=INITIALIZATION)


@pytest.mark.parametrize("preset", ["4layer", "8layer"])
def test_logits_of_a_slice_equal_hf(pool, preset, source, tmp_path):
    part = tmp_path / preset
    run_glm5next("slice", source, part, "--layers", preset).check_returncode()
    batches = [tokens(length, seed=4) for length in LENGTHS]
    (answer,) = pool.run(RUN, Layout(), checkpoint=str(part), batches=batches, backward=False, margins=True)
    assert answer["margins"]["indexer"] < float("inf"), "no pool was ever rejected"
    reference = hf_reference.load(part)
    with torch.no_grad():
        for i, batch in enumerate(batches):
            expected = hf_reference.logits(reference, batch)
            assert expected.std() > 0.1
            assert (answer["logits"][i] - expected).abs().max() < 1e-4
