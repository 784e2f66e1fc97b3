"""Pipelines of the 45 layers, stages of every kind, virtual stages and recompute: bit for bit as one process."""

import pytest

from glm5next_plugin.architecture import Architecture

from .agreement import require_close_gradients, require_equal_logits
from .packed_batch import PackedBatch
from .process_pool import Layout
from .test_hf_parity import RUN, tokens
from .test_layouts import NOISE

RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
BATCHES = [PackedBatch([tokens(length, seed=20)[0] for length in lengths]) for lengths in [(37, 50, 1, 3), (3, 25, 41)]]


def layers(first: int | None = None, last: int | None = None):
    """How many layers the first and the last stage have; the others share the rest."""
    names = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    return tuple((name, count) for name, count in names.items() if count is not None)


def stages(layout: str):
    """Layers of each stage as megatron-core's layout string."""
    return (("pipeline_model_parallel_layout", layout),)


def deallocate(value: bool):
    return (("deallocate_pipeline_outputs", value),)


VIRTUAL = (
    ("virtual_pipeline_model_parallel_size", 2),
    ("overlap_p2p_comm", True),
    ("batch_p2p_comm", False),
)

DEEP = {
    "recomputed": Layout(provider=RECOMPUTE),
    "23-22": Layout(pp=2, world=2, provider=layers(first=23)),
    "15-15-15": Layout(pp=3, world=3),
    "11-11-11-12": Layout(pp=4, world=4, provider=layers(last=12)),
    "11-11-11-12 by layout string, recomputed": Layout(
        pp=4, world=4, provider=stages("Et*11|t*11|t*11|t*12L") + RECOMPUTE
    ),
    "12-11-11-11": Layout(pp=4, world=4, provider=stages("Et*12|t*11|t*11|t*11L")),
}

# of tiny's 8 layers, DSA at 3 and 7, the first three dense
STAGES = {
    "without DSA, without experts, of one layer": Layout(pp=4, world=4, provider=stages("Et*3|t|t*3|tL")),
    "embedding and head alone": Layout(pp=4, world=4, provider=stages("E|t*4|t*4|L")),
    "outputs freed": Layout(pp=4, world=4, provider=stages("Et|t*2|t*4|tL") + deallocate(True)),
    "outputs kept": Layout(pp=4, world=4, provider=stages("Et|t*2|t*4|tL") + deallocate(False)),
    "recomputed, outputs freed": Layout(pp=4, world=4, provider=stages("Et|t*2|t*4|tL") + deallocate(True) + RECOMPUTE),
    "two virtual stages": Layout(pp=2, world=2, provider=VIRTUAL),
    "two virtual stages, recomputed": Layout(pp=2, world=2, provider=VIRTUAL + RECOMPUTE),
    "two virtual stages by layout string": Layout(pp=2, world=2, provider=stages("Et|t*3|t*3|tL") + VIRTUAL),
}


@pytest.fixture(scope="module")
def deep_in_one_process(pool, deep):
    kinds = Architecture.from_pretrained(deep).attention_kinds
    assert len(kinds) == 45 and kinds.count("dsa") == 11
    (answer,) = pool.run(RUN, Layout(), checkpoint=str(deep), batches=BATCHES, margins=True)
    assert NOISE < answer["margins"]["router"] < float("inf")
    assert NOISE < answer["margins"]["indexer"] < float("inf")
    return answer


@pytest.fixture(scope="module")
def tiny_in_one_process(pool, checkpoints):
    (answer,) = pool.run(RUN, Layout(), checkpoint=str(checkpoints(4)), batches=BATCHES)
    return answer


@pytest.mark.parametrize("name", DEEP)
def test_layouts_of_45_layers(pool, deep, deep_in_one_process, name):
    answers = pool.run(RUN, DEEP[name], checkpoint=str(deep), batches=BATCHES)
    require_equal_logits(answers, deep_in_one_process)
    require_close_gradients(answers, deep_in_one_process)


@pytest.mark.parametrize("name", STAGES)
def test_stages_of_every_kind(pool, checkpoints, tiny_in_one_process, name):
    answers = pool.run(RUN, STAGES[name], checkpoint=str(checkpoints(4)), batches=BATCHES)
    require_equal_logits(answers, tiny_in_one_process)
    require_close_gradients(answers, tiny_in_one_process)
