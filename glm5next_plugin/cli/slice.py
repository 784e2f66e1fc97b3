"""``glm5next slice``: some layers of a checkpoint as a checkpoint of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .one_thread import keep_to_one_thread
from .progress import byte_progress


def slice(
    source: Annotated[Path, typer.Argument(help="Checkpoint in any spelling, BF16 or FP8, or a torch_dist directory.")],
    target: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete.")],
    layers: Annotated[str, typer.Option(help="8layer, 4layer, or numbers and runs: 0-7, or 0,4,5,7.")],
    mtp: Annotated[bool, typer.Option("--mtp", help="Keep the MTP layers, which are dropped otherwise.")] = False,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes, at most.")] = min(8, os.cpu_count() or 1),
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what was written and compare it before it gets its name.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted run left.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a target, or what an interrupted run left.")
    ] = False,
) -> None:
    """Make a checkpoint of some layers of another, numbered anew from 0, with a config that says so.

    Dtypes stay as they are, FP8 and its scales included, and so does the vision tower. The result loads in transformers
    and in Megatron. 8layer is the layers 0 to 7; 4layer a dense and two MoE KDA layers and a MoE DSA layer (0, 4, 5 and
    7 of the release).

    [bold]Examples[/bold]

    [cyan]glm5next slice GLM-5.3-Flash-FP8 flash-8layer --layers 8layer[/cyan]

    [cyan]glm5next slice GLM-5.3-Flash-BF16 flash-small --layers 0,4,5,7 --mtp[/cyan]

    Exit codes: 0 done, 2 bad input or setting, 130 interrupted.
    """
    keep_to_one_thread()
    from glm5next_plugin.adapters.megatron.convert import open_source, refuse_nested
    from glm5next_plugin.checkpoint.job import run_job
    from glm5next_plugin.checkpoint.released_target import ReleasedTarget
    from glm5next_plugin.checkpoint.slicing import SlicedSource, describe, parse_layers

    console = Console(stderr=True)
    refuse_nested(source, target)
    whole = open_source(source)
    whole.check()
    kept = parse_layers(layers, whole.architecture)
    part = SlicedSource(whole, kept, mtp=mtp)
    try:
        with byte_progress(console) as progress:
            run_job(
                part,
                ReleasedTarget(part, dtype="keep", workers=workers),
                target,
                overwrite=overwrite,
                resume=resume,
                verify=verify,
                progress=progress,
            )
    except KeyboardInterrupt:
        console.print("interrupted; the same command with --resume goes on")
        raise typer.Exit(130) from None
    console.print(f"{target}: layers {describe(whole.architecture, kept)}", highlight=False, soft_wrap=True)
