"""``glm5next inspect``: what is in a checkpoint, from headers and index."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint in any spelling, BF16 or FP8, or a torch_dist directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    base: Annotated[
        Path | None, typer.Option(help="Checkpoint that PATH was trained from, if PATH is a framework's own.")
    ] = None,
) -> None:
    """Show what is in a checkpoint: class by class counts, bytes and dtypes, and what is missing, unknown or wrong.

    No tensor is read, so 300 GB take seconds. What is needed follows from its config.json.

    [bold]Examples[/bold]

    [cyan]glm5next inspect GLM-5.3-Flash-FP8[/cyan]

    [cyan]glm5next inspect glm5next-torch-dist --json[/cyan]  the same for a script

    Exit codes: 0 complete, 1 something is missing or wrong, 2 no checkpoint of this model.
    """
    from glm5next_plugin.adapters.megatron.convert import open_source
    from glm5next_plugin.checkpoint.inspection import inspect_source

    found = inspect_source(open_source(path, base))
    if json:
        print(json_module.dumps(found.as_json(), indent=2))
        raise typer.Exit(int(bool(found.faults)))
    console = Console()
    table = Table("class", "tensors", "GB", "dtypes")
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, members in found.classes.items():
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in members.dtypes.items())
        table.add_row(name, f"{members.tensors:,}", f"{members.nbytes / 1e9:.3f}", dtypes)
    kinds = {kind: found.layers.count(kind) for kind in dict.fromkeys(found.layers)}
    schedule = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    console.print(
        f"{path}: {found.format}, {found.files} files, {found.file_bytes / 1e9:.2f} GB", highlight=False, soft_wrap=True
    )
    console.print(
        f"{len(found.layers)} layers ({schedule}) and {found.mtp_layers} for MTP; {found.text_tensors:,} text and "
        f"{found.vision_tensors:,} vision tensors, {found.fp8_matrices:,} FP8 matrices",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    for fault in found.faults:
        console.print(f"- {fault}", highlight=False, markup=False, soft_wrap=True)
    faults = len(found.faults)
    console.print("complete" if not faults else f"{faults} fault{'s' if faults > 1 else ''}")
    raise typer.Exit(int(bool(faults)))
