"""The planner's counts against modules of the real config, rank by rank; nothing of their size is allocated."""

import pytest

from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.parallel_layout import make_layout
from glm5next_plugin.recipes.parameters import rank_parameters
from glm5next_plugin.recipes.planner import plan_shape, planned_architecture
from glm5next_plugin.recipes.shapes import SHAPES

from .process_pool import Layout


def layout_of(shape: str, variant: str):
    """The plan's layout; for the release on one node, which does not fit there, the layout that was refused."""
    try:
        return plan_shape(shape, variant).layout
    except InputError:
        sizes = dict(zip(("tensor", "pipeline", "expert"), SHAPES[shape].sizes[variant], strict=True))
        return make_layout(planned_architecture(variant), SHAPES[shape].gpus, **sizes)


@pytest.mark.parametrize(
    ("shape", "variant"),
    [(shape, "full") for shape in SHAPES] + [("1x8", "8layer"), ("1x8", "4layer")],
)
def test_every_rank_holds_what_the_planner_says(pool, shape, variant):
    architecture, layout = planned_architecture(variant), layout_of(shape, variant)
    answers = pool.run(
        "tests.megatron.planner_runs:counted_by_rank",
        Layout(world=2),
        architecture=architecture,
        planned=layout,
        timeout=400,
    )
    counts = {rank: count for answer in answers for rank, count in answer.items()}
    assert sorted(counts) == list(range(layout.gpus))
    assert {count["stage"] for count in counts.values()} == set(range(layout.pipeline))
    for rank, count in counts.items():
        planned = rank_parameters(architecture, layout, count.pop("stage"))
        assert count == dict(dense=planned.dense, experts=planned.experts, frozen=planned.frozen, fp32=planned.fp32), (
            rank
        )
