"""A layout for a model on GPUs, with what every rank holds: for a known shape, or searched."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.slicing import parse_layers, sliced_architecture
from glm5next_plugin.errors import InputError

from . import variants
from .memory import GIB, RankMemory, rank_memory
from .parallel_layout import ParallelLayout, make_layout
from .parameters import unique_parameters
from .shapes import SHAPES

PLANNED = ("full", "8layer", "4layer")
DEFAULT_TOKENS = 8192
_MAX_TENSOR = 8  # a node's GPUs, within which the tensor parallel group has to stay
Framework = Literal["verl", "miles"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout that fits.

    Attributes:
        variant: which model.
        layout: parallel sizes.
        gpu_memory: GiB a GPU.
        tokens: of a micro-batch, a GPU.
        recompute: whether activations only fit with full recompute.
        unique: parameters of the text model.
        stages: memory of a rank of each pipeline stage.
    """

    variant: str
    layout: ParallelLayout
    gpu_memory: float
    tokens: int
    recompute: bool
    unique: int
    stages: tuple[RankMemory, ...]

    def as_json(self, framework: Framework | None = None) -> dict[str, Any]:
        """All of it as plain numbers, bytes where no unit is said."""
        layout = dataclasses.asdict(self.layout)
        layout |= {"data": self.layout.data, "expert_data": self.layout.expert_replicas}
        stages = []
        for memory in self.stages:
            stage = dataclasses.asdict(memory)
            stage["parameters"]["total"] = memory.parameters.total
            stage["total"] = memory.total(self.recompute)
            stage["layers"] = list(self.layout.stage_layers(memory.stage))
            stages.append(stage)
        plan = dataclasses.asdict(self) | {"layout": layout, "stages": stages}
        return plan | ({"settings": settings(self, framework)} if framework else {})


def planned_architecture(variant: str) -> Architecture:
    """The release, or one of its slices.

    Raises:
        InputError: another name.
    """
    if variant not in PLANNED:
        raise InputError(f"variant {variant!r}; needed: one of {', '.join(PLANNED)}")
    whole = variants.full()
    if variant == "full":
        return whole
    return sliced_architecture(whole, parse_layers(variant, whole), mtp=False)


def plan_shape(
    shape: str,
    variant: str = "full",
    *,
    gpu_memory: float | None = None,
    tokens: int = DEFAULT_TOKENS,
    **sizes: int | None,
) -> Plan:
    """The plan of a shape by name.

    Args:
        shape: one of :data:`.shapes.SHAPES`.
        variant: one of :data:`PLANNED`.
        gpu_memory: GiB a GPU, instead of what the shape's GPU has.
        tokens: of a micro-batch, a GPU.
        sizes: ``tensor``, ``pipeline``, ``expert``, ``context`` instead of the recipe's; None leaves it.

    Raises:
        InputError: no such shape or variant, a layout that cannot work, or one that does not fit.
    """
    if shape not in SHAPES:
        raise InputError(f"shape {shape!r}; needed: one of {', '.join(SHAPES)}")
    known, architecture = SHAPES[shape], planned_architecture(variant)
    wanted = dict(zip(("tensor", "pipeline", "expert"), known.sizes[variant], strict=True), context=1)
    wanted |= {name: size for name, size in sizes.items() if size is not None}
    layout = make_layout(architecture, known.gpus, **wanted)
    return _fitted(variant, architecture, layout, gpu_memory or known.gpu_memory, tokens)


def search(
    gpus: int,
    gpu_memory: float,
    variant: str = "full",
    *,
    tokens: int = DEFAULT_TOKENS,
    **sizes: int | None,
) -> Plan:
    """The layout with the least communication that fits: smallest TP x PP, then PP, then without recompute.

    Args:
        gpus: ranks in all.
        gpu_memory: GiB a GPU.
        variant, tokens: as in :func:`plan_shape`.
        sizes: fixes a size that is not to be searched.

    Raises:
        InputError: nothing fits; names the nearest layout and what it lacks.
    """
    if gpus < 1:
        raise InputError(f"{gpus} GPUs; needed: at least 1")
    architecture = planned_architecture(variant)
    fixed = {name: size for name, size in sizes.items() if size is not None}
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    choices = dict(tensor=[n for n in divisors if n <= _MAX_TENSOR], pipeline=divisors, expert=divisors, context=[1])
    choices |= {name: [size] for name, size in fixed.items()}
    layouts, refusals = [], []
    for chosen in itertools.product(*choices.values()):
        try:
            layouts.append(make_layout(architecture, gpus, **dict(zip(choices, chosen, strict=True))))
        except InputError as error:
            refusals.append(str(error))
    if not layouts:
        raise InputError(f"no layout of {variant} on {gpus} GPUs, such as: {refusals[0]}")
    fitting, nearest = [], None
    for layout in layouts:
        stages = _stages(architecture, layout, tokens)
        needed = max(memory.total(recompute=True) for memory in stages)
        if nearest is None or needed < nearest[0]:
            nearest = (needed, layout)
        if needed <= gpu_memory * GIB:
            recompute = max(memory.total(recompute=False) for memory in stages) > gpu_memory * GIB
            order = (layout.tensor * layout.pipeline, layout.pipeline, recompute, -layout.expert)
            fitting.append((order, layout))
    if not fitting:
        needed, layout = nearest
        raise InputError(
            f"{variant} does not fit on {gpus} GPUs of {gpu_memory:g} GiB: the nearest of {len(layouts)} layouts "
            f"({layout}) needs {needed / GIB:.1f} GiB a GPU with full recompute"
        )
    return _fitted(variant, architecture, min(fitting, key=lambda item: item[0])[1], gpu_memory, tokens)


def settings(plan: Plan, framework: Framework) -> list[str]:
    """The plan as command-line settings of verl (hydra) or miles."""
    layout = plan.layout
    first, last = layout.layers_per_stage[0], layout.layers_per_stage[-1]
    uneven = len(set(layout.layers_per_stage)) > 1
    if framework == "miles":
        lines = [
            f"--tensor-model-parallel-size {layout.tensor}",
            *(["--sequence-parallel"] if layout.tensor > 1 else []),
            f"--pipeline-model-parallel-size {layout.pipeline}",
            f"--context-parallel-size {layout.context}",
            f"--expert-model-parallel-size {layout.expert}",
            "--expert-tensor-parallel-size 1",
            f"--max-tokens-per-gpu {plan.tokens}",
        ]
        if uneven:
            lines += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
        if plan.recompute:
            lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        return lines
    actor = "actor_rollout_ref.actor"
    override = f"+{actor}.megatron.override_transformer_config"
    lines = [
        f"{actor}.megatron.tensor_model_parallel_size={layout.tensor}",
        f"{actor}.megatron.pipeline_model_parallel_size={layout.pipeline}",
        f"{actor}.megatron.context_parallel_size={layout.context}",
        f"{actor}.megatron.expert_model_parallel_size={layout.expert}",
        f"{actor}.megatron.expert_tensor_parallel_size=1",
        f"{actor}.ppo_max_token_len_per_gpu={plan.tokens}",
    ]
    if uneven:
        lines += [
            f"{override}.num_layers_in_first_pipeline_stage={first}",
            f"{override}.num_layers_in_last_pipeline_stage={last}",
        ]
    if plan.recompute:
        lines += [
            f"{override}.recompute_granularity=full",
            f"{override}.recompute_method=uniform",
            f"{override}.recompute_num_layers=1",
        ]
    return lines


def _stages(architecture: Architecture, layout: ParallelLayout, tokens: int) -> tuple[RankMemory, ...]:
    return tuple(rank_memory(architecture, layout, stage, tokens) for stage in range(layout.pipeline))


def _fitted(variant: str, architecture: Architecture, layout: ParallelLayout, gpu_memory: float, tokens: int) -> Plan:
    stages = _stages(architecture, layout, tokens)
    for recompute in (False, True):
        worst = max(stages, key=lambda memory: memory.total(recompute))
        if worst.total(recompute) <= gpu_memory * GIB:
            return Plan(variant, layout, gpu_memory, tokens, recompute, unique_parameters(architecture), stages)
    parts = {
        "weights": worst.weights,
        "gradients": worst.gradients,
        "optimizer": worst.optimizer,
        "activations": worst.activations_recomputed,
        "reserve": worst.reserve,
    }
    raise InputError(
        f"{variant} does not fit at {layout}: stage {worst.stage} needs "
        + " + ".join(f"{size / GIB:.1f} ({name})" for name, size in parts.items())
        + f" = {worst.total(recompute=True) / GIB:.1f} GiB a GPU with full recompute; there are {gpu_memory:g} GiB"
    )
