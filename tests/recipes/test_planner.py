"""Layouts and memory of the planner against figures worked out by hand, and what it refuses."""

import json

import pytest

from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.memory import GIB, rank_memory, stream_bytes
from glm5next_plugin.recipes.parallel_layout import make_layout, split_layers
from glm5next_plugin.recipes.parameters import rank_parameters
from glm5next_plugin.recipes.planner import plan_shape, planned_architecture, search, settings

from ..command import run_glm5next

FULL = planned_architecture("full")


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (45, 1, (45,)),
        (45, 2, (23, 22)),
        (45, 3, (15, 15, 15)),
        (45, 4, (11, 11, 11, 12)),
        (45, 5, (9, 9, 9, 9, 9)),
        (45, 8, (4, 6, 6, 6, 6, 6, 6, 5)),
        (4, 4, (1, 1, 1, 1)),
        (8, 2, (4, 4)),
    ],
)
def test_layers_are_split_as_first_and_last_stage_settings_can_say(layers, stages, expected):
    assert split_layers(layers, stages) == expected


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="5 pipeline stages for 4 layers; needed: 1 to 4"):
        split_layers(4, 5)


def test_the_release_has_313_billion_text_parameters():
    # most of them: embedding and head, and 289 experts of 3 x 4096 x 2048 in each of 42 layers
    plan = plan_shape("16x4")
    assert round(plan.unique / 1e9, 1) == 313.3
    assert plan.unique > 2 * 154880 * 4096 + 42 * 289 * 3 * 4096 * 2048


@pytest.mark.parametrize(
    ("shape", "sizes", "layers"),
    [
        ("16x4", (8, 4, 16, 1, 2), (11, 11, 11, 12)),
        ("8x4", (8, 4, 8, 1, 1), (11, 11, 11, 12)),
        ("6x4", (8, 3, 8, 1, 1), (15, 15, 15)),
    ],
)
def test_shapes_have_the_layouts_of_the_recipes(shape, sizes, layers):
    layout = plan_shape(shape).layout
    assert (layout.tensor, layout.pipeline, layout.expert, layout.context, layout.data) == sizes
    assert layout.layers_per_stage == layers


def test_a_rank_of_16x4_by_hand():
    """Stage 1 of TP 8, PP 4, EP 16: layers 11 to 21, of which 11, 15 and 19 are DSA; 288 / 16 experts a layer."""
    layout = plan_shape("16x4").layout
    kda = 4 * 4096 * 1024 + 4096 * 8 + 2 * (4096 * 128 + 128 * 1024) + 3 * 1024 * 4 + 8 + 1024 + 128
    dsa = 4096 * 1536 + 1536 + 1536 * 8 * 256 + 4096 * 512 + 512 + 512 * 8 * 512 + 8 * 256 * 4096
    indexer = 32 * 128 * 1536 + 128 * 4096 + 32 * 4096 + 2 * 128 + 128 * 4096 + 4 * 128
    hyper = 2 * (24 * 4 * 4096 + 24 + 3)
    moe = 288 * 4096 + 3 * 4096 * 2048 // 8
    count = rank_parameters(FULL, layout, 1)
    assert count.dense == 8 * kda + 3 * dsa + 11 * (hyper + moe + 2 * 4096)
    assert count.experts == 11 * 18 * 3 * 4096 * 2048
    assert count.frozen == 3 * indexer
    assert count.fp32 == 8 * (8 + 1024) + 11 * 2 * 27

    memory = rank_memory(FULL, layout, 1, 8192)
    assert memory.weights == 2 * count.total + 2 * count.fp32
    assert memory.gradients == 4 * (count.dense + count.experts)
    # dense state over 2 replicas, experts over 64 / (16 x 4) = 1
    assert memory.optimizer == (12 * count.dense - 4 * count.fp32) // 2 + 12 * count.experts
    # four streams of 4096 in bf16, an eighth of the tokens
    assert stream_bytes(FULL, 8) == 4 * 4096 * 2 // 8
    # three micro-batches in flight, 11 inputs each, and one layer in full
    assert memory.activations_recomputed > 8192 * 3 * 11 * stream_bytes(FULL, 8)
    assert memory.activations > 4 * memory.activations_recomputed


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(expert=16), "EP 16 x PP 4 needs a multiple of 64 ranks; there are 32"),
        (dict(expert=64, pipeline=1, tensor=1), "EP 64 does not divide the 288 routed experts"),
        (dict(tensor=3), "TP 3 does not divide 64 \\(attention heads\\)"),
        (dict(context=16, tensor=8, pipeline=1), "TP 8 x CP 16 does not divide the 64 KDA heads"),
        (dict(pipeline=64), "PP 64 is more than the 45 layers"),
        (dict(pipeline=3), "TP 8 x CP 1 x PP 3 needs a multiple of 24 ranks; there are 32"),
        (dict(tensor=0), "TP is 0; needed: at least 1"),
    ],
)
def test_layouts_that_cannot_work_are_refused_with_the_arithmetic(sizes, reason):
    with pytest.raises(InputError, match=reason):
        plan_shape("8x4", **sizes)


def test_what_does_not_fit_is_refused_with_the_sum():
    with pytest.raises(InputError) as refused:
        plan_shape("1x8")
    message = str(refused.value)
    parts, total = message.split("needs ")[1].split(" = ")
    figures = [float(part.split()[0]) for part in parts.split(" + ")]
    assert sum(figures) == pytest.approx(float(total.split()[0]), abs=0.3)
    assert float(total.split()[0]) > 131.3 and "there are 131.3 GiB" in message
    # 2, 4 and 12 bytes a parameter over 8 GPUs cannot be less
    assert sum(figures) > 18 * 313.3e9 / 8 / GIB


def test_memory_of_the_gpu_can_be_given():
    assert plan_shape("16x4", gpu_memory=131.3).layout.expert == 16
    with pytest.raises(InputError, match="there are 80 GiB"):
        plan_shape("16x4", gpu_memory=80)
    assert not plan_shape("6x4").recompute
    assert plan_shape("6x4", gpu_memory=250).recompute


@pytest.mark.parametrize("variant", ["8layer", "4layer"])
@pytest.mark.parametrize("shape", ["16x4", "8x4", "6x4", "1x8"])
def test_slices_fit_on_every_shape(shape, variant):
    plan = plan_shape(shape, variant)
    assert sum(plan.layout.layers_per_stage) == int(variant[0])
    assert all(memory.total(plan.recompute) <= plan.gpu_memory * GIB for memory in plan.stages)


def test_a_search_finds_what_fits():
    plan = search(64, 131.3)
    layout = plan.layout
    assert layout == make_layout(
        FULL, 64, tensor=layout.tensor, pipeline=layout.pipeline, expert=layout.expert, context=1
    )
    assert all(memory.total(plan.recompute) <= 131.3 * GIB for memory in plan.stages)
    # nothing with fewer ranks in a model replica would
    smaller = [(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4) if t * p < layout.tensor * layout.pipeline]
    assert smaller
    for tensor, pipeline in smaller:
        with pytest.raises(InputError, match="does not fit on 64 GPUs"):
            search(64, 131.3, tensor=tensor, pipeline=pipeline)


def test_a_search_that_finds_nothing_says_how_near_it_came():
    with pytest.raises(InputError, match=r"full does not fit on 8 GPUs of 80 GiB: the nearest of .* needs 6\d\d"):
        search(8, 80)
    with pytest.raises(InputError, match="no layout of full on 7 GPUs, such as: TP 3 "):
        search(7, 80, tensor=3)


def test_settings_say_what_the_plan_says():
    plan = plan_shape("8x4", gpu_memory=198)
    assert plan.recompute
    miles = settings(plan, "miles")
    assert "--expert-model-parallel-size 8" in miles and "--decoder-last-pipeline-num-layers 12" in miles
    assert "--sequence-parallel" in miles and "--recompute-granularity full" in miles
    verl = settings(plan, "verl")
    assert "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8" in verl
    override = "+actor_rollout_ref.actor.megatron.override_transformer_config."
    assert override + "num_layers_in_last_pipeline_stage=12" in verl and override + "recompute_method=uniform" in verl


def test_the_command_prints_the_plan():
    result = run_glm5next("plan", "--shape", "16x4", "--for", "miles")
    assert result.returncode == 0, result.stderr
    for part in ("313.3 B text parameters", "layers 11/11/11/12", "33-44", "--expert-model-parallel-size 16"):
        assert part in result.stdout
    found = json.loads(run_glm5next("plan", "--shape", "6x4", "--for", "verl", "--json").stdout)
    assert found["layout"]["layers_per_stage"] == [15, 15, 15] and len(found["stages"]) == 3
    assert found["stages"][2]["parameters"]["total"] == rank_parameters(FULL, plan_shape("6x4").layout, 2).total
    assert "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3" in found["settings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --shape, or --gpus"),
        (("--shape", "8x4", "--gpus", "32"), "either --shape, or --gpus"),
        (("--gpus", "32"), "--gpus came without --gpu-memory"),
        (("--shape", "2x2"), "shape '2x2'; needed: one of 16x4, 8x4, 6x4, 1x8"),
        (("--shape", "8x4", "--ep", "16"), "EP 16 x PP 4 needs a multiple of 64 ranks; there are 32"),
    ],
)
def test_the_command_refuses(arguments, message):
    result = run_glm5next("plan", *arguments)
    assert result.returncode == 2 and message in result.stderr and not result.stdout
