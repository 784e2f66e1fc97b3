"""``glm5next verify``: two checkpoints, tensor by tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .one_thread import keep_to_one_thread
from .progress import byte_progress

_SHOWN = 20


def verify(
    first: Annotated[Path, typer.Argument(help="Checkpoint in any spelling, BF16 or FP8, or a torch_dist directory.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    base: Annotated[
        Path | None, typer.Option(help="Checkpoint that they were trained from, for a framework's own without hf/.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes, at most.")] = min(8, os.cpu_count() or 1),
) -> None:
    """Compare two checkpoints tensor by tensor: equal by the bit, across spellings, formats and dtypes.

    FP8 counts as its exact dequantisation in BF16; of a BF16 and an FP32 tensor the latter is rounded, and counted
    apart. A_log, dt_bias, the expert bias and the bases and scales of the hyper-connections must be fp32 on both sides.

    [bold]Examples[/bold]

    [cyan]glm5next verify GLM-5.3-Flash-FP8 glm5next-torch-dist[/cyan]

    [cyan]glm5next verify before after --workers 4[/cyan]

    Exit codes: 0 equal, 1 unequal, 2 bad input, 130 interrupted.
    """
    keep_to_one_thread()
    from glm5next_plugin.adapters.megatron.convert import open_source
    from glm5next_plugin.checkpoint.comparing import compare
    from glm5next_plugin.checkpoint.torch_dist_layout import needs_base

    sources = [open_source(path, base if needs_base(path) else None) for path in (first, second)]
    for source in sources:
        source.check()
    console = Console(stderr=True)
    total = sum(source_bytes for source_bytes in sources[0].files().values())
    done = 0
    try:
        with byte_progress(console) as show:

            def advance(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                show("comparing", done, total)

            found = compare(*sources, workers=workers, progress=advance)
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(130) from None
    differences = [f"{name}: {how}" for name, how in found.different.items()]
    differences += [f"{name}: only in {first}" for name in found.only_first]
    differences += [f"{name}: only in {second}" for name in found.only_second]
    for line in differences[:_SHOWN]:
        print(line)
    if len(differences) > _SHOWN:
        print(f"and {len(differences) - _SHOWN} more")
    print(
        f"{len(found.equal):,} tensors equal by the bit, {len(found.rounded):,} after rounding to BF16, "
        f"{len(found.different):,} different, {len(found.only_first):,} and {len(found.only_second):,} in one alone"
    )
    raise typer.Exit(int(not found.same))
