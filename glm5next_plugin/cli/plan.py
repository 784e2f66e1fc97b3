"""``glm5next plan``: parallel sizes for a cluster, and what every rank holds."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.memory import GIB, RankMemory
from glm5next_plugin.recipes.planner import DEFAULT_TOKENS, PLANNED, Plan, plan_shape, search, settings
from glm5next_plugin.recipes.shapes import SHAPES

Variant = enum.StrEnum("Variant", {name: name for name in PLANNED})
Framework = enum.StrEnum("Framework", {name: name for name in ("verl", "miles")})


def plan(
    shape: Annotated[
        str | None, typer.Option(help=f"Nodes x GPUs a node: {', '.join(SHAPES)} (x4: GB300, 1x8: H200).")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Search a layout for so many GPUs instead.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB a GPU; the shape's own where a shape is given.", show_default=False)
    ] = None,
    variant: Annotated[Variant, typer.Option(help="The release, or one of its slices.")] = Variant.full,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, a GPU.")] = DEFAULT_TOKENS,
    tensor: Annotated[int | None, typer.Option("--tp", help="Tensor parallel size.", show_default="chosen")] = None,
    pipeline: Annotated[int | None, typer.Option("--pp", help="Pipeline stages.", show_default="chosen")] = None,
    expert: Annotated[int | None, typer.Option("--ep", help="Expert parallel size.", show_default="chosen")] = None,
    context: Annotated[int | None, typer.Option("--cp", help="Context parallel size.", show_default="1")] = None,
    framework: Annotated[
        Framework | None, typer.Option("--for", help="Print the settings of this framework.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Choose TP, PP, EP and CP, and show what a rank of every pipeline stage holds.

    Weights (bf16), gradients (fp32) and optimizer (Adam, fp32 masters, split over replicas) are exact; activations are
    an estimate, with full recompute and without. A layout that cannot work, or does not fit, is refused with the
    arithmetic.

    [bold]Examples[/bold]

    [cyan]glm5next plan --shape 16x4 --for miles[/cyan]

    [cyan]glm5next plan --shape 1x8 --variant 4layer --json[/cyan]

    [cyan]glm5next plan --gpus 64 --gpu-memory 131 --for verl[/cyan]

    Exit codes: 0 done, 2 a layout that cannot work or does not fit.
    """
    if (shape is None) == (gpus is None):
        raise InputError("needed: either --shape, or --gpus and --gpu-memory")
    sizes = dict(tensor=tensor, pipeline=pipeline, expert=expert, context=context)
    if shape is not None:
        found = plan_shape(shape, variant.value, gpu_memory=gpu_memory, tokens=tokens, **sizes)
    elif gpu_memory is None:
        raise InputError("--gpus came without --gpu-memory; needed: the GiB of a GPU")
    else:
        found = search(gpus, gpu_memory, variant.value, tokens=tokens, **sizes)
    if as_json:
        json.dump(found.as_json(framework and framework.value), sys.stdout, indent=2)
        print()
        return
    _show(found, framework)


def _show(found: Plan, framework: Framework | None) -> None:
    console = Console()
    console.print(
        f"{found.variant}, {found.unique / 1e9:.1f} B text parameters, on {found.layout.gpus} GPUs of "
        f"{found.gpu_memory:g} GiB, {found.tokens} tokens a micro-batch"
    )
    console.print(
        f"{found.layout}: " + ("full recompute" if found.recompute else "no recompute needed"), highlight=False
    )
    table = Table(title="a rank of each stage, GiB where nothing is said")
    table.add_column("stage")
    for memory in found.stages:
        table.add_column(str(memory.stage), justify="right")
    layers = [found.layout.stage_layers(memory.stage) for memory in found.stages]
    table.add_row("layers", *(f"{mine[0]}-{mine[-1]}" for mine in layers))
    table.add_row("parameters, 1e9", *(f"{memory.parameters.total / 1e9:.3f}" for memory in found.stages))
    rows: dict[str, Callable[[RankMemory], float]] = {
        "weights": lambda memory: memory.weights,
        "gradients": lambda memory: memory.gradients,
        "optimizer": lambda memory: memory.optimizer,
        "activations": lambda memory: memory.activations,
        "recomputed": lambda memory: memory.activations_recomputed,
        "total": lambda memory: memory.total(found.recompute),
        "free": lambda memory: found.gpu_memory * GIB - memory.total(found.recompute),
    }
    for name, size in rows.items():
        table.add_row(name, *(f"{size(memory) / GIB:.1f}" for memory in found.stages))
    console.print(table)
    console.print(f"total counts {found.stages[0].reserve / GIB:.0f} GiB for CUDA, NCCL and workspaces")
    for line in settings(found, framework.value) if framework else ():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
