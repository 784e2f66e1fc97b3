"""``glm5next convert``: between the released format and torch_dist."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.staging import refuse_occupied
from glm5next_plugin.checkpoint.torch_dist_layout import is_torch_dist
from glm5next_plugin.errors import InputError


def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint directory, in any spelling, or a torch_dist directory.")],
    target: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a target that is not empty.")] = False,
) -> None:
    """Convert a checkpoint to Megatron's torch_dist format, or such a one back to the released format.

    The direction follows from what SOURCE is. One process, no GPU; the result loads in every TP, PP and EP layout.
    Vision and MTP tensors are carried along and come back on the way out. Every name, shape and dtype is checked first.

    [bold]Examples[/bold]

    [cyan]glm5next convert GLM-5.3-Flash-BF16 glm5next-torch-dist[/cyan]  for training

    [cyan]glm5next convert glm5next-torch-dist trained[/cyan]  for serving
    """
    if not source.is_dir():
        raise InputError(f"{source}: no such directory")
    # what can be refused is refused before Megatron takes its time to load
    refuse_occupied(target, overwrite=overwrite)
    back = is_torch_dist(source)
    if not back:
        CheckpointReader(source).check()
    console = Console(stderr=True)
    started = time.monotonic()
    # the frameworks narrate their start; a converter's output is its own
    with console.status("loading Megatron") as status, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        from glm5next_plugin.adapters.megatron.registration import register

        register()
        from glm5next_plugin.adapters.megatron import convert as converter

        direction = converter.to_released if back else converter.to_torch_dist
        direction(source, target, progress=status.update, overwrite=overwrite)
    console.print(f"{target} written in {time.monotonic() - started:.0f} s")
