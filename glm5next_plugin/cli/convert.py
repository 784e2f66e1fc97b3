"""``glm5next convert``: between the released format and torch_dist, BF16 and FP8."""

from __future__ import annotations

import enum
import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .one_thread import keep_to_one_thread
from .progress import byte_progress


class Format(enum.StrEnum):
    """Formats of a checkpoint."""

    torch_dist = "torch_dist"
    released = "released"


class Dtype(enum.StrEnum):
    """Dtypes of what is written."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint in any spelling, BF16 or FP8, or a torch_dist directory.")],
    target: Annotated[Path, typer.Argument(help="Directory to make; it appears when it is complete.")],
    to: Annotated[Format | None, typer.Option(help="Format to write; by default the one that SOURCE is not.")] = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Write FP8 weights with block scales, as the FP8 release has.")
    ] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Of what is neither FP8 nor always fp32; as SOURCE.")] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Checkpoint that SOURCE was trained from, if SOURCE is a framework's own and has no hf/."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes, at most.")] = min(8, os.cpu_count() or 1),
    max_shard_size: Annotated[
        float, typer.Option(min=0.000001, help="GB (1e9 bytes) of a safetensors file, at most.")
    ] = 5.0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what was written and compare it with SOURCE before it gets its name.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted conversion left.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a target, or what an interrupted conversion left.")
    ] = False,
) -> None:
    """Convert a checkpoint to Megatron's torch_dist format, or such a one back to the released format.

    No GPU, no Megatron process: tensors stream from file to file, so memory does not grow with the model. The result
    loads in every TP, PP and EP layout. Vision and MTP tensors are carried along and come back on the way out. Every
    name, shape and dtype is checked before the first byte is written, every value as it is read.

    [bold]Examples[/bold]

    [cyan]glm5next convert GLM-5.3-Flash-FP8 glm5next-torch-dist[/cyan]  for training

    [cyan]glm5next convert glm5next-torch-dist trained --verify[/cyan]  for serving, in BF16

    [cyan]glm5next convert run/iter_0000100 trained-fp8 --base glm5next-torch-dist --fp8[/cyan]  what a framework saved

    [cyan]glm5next convert GLM-5.3-Flash-FP8 GLM-5.3-Flash-BF16 --to released[/cyan]  dequantised

    [cyan]glm5next convert GLM-5.3-Flash-FP8 glm5next-torch-dist --resume[/cyan]  after an interruption

    Exit codes: 0 done, 2 bad input or setting, 130 interrupted.
    """
    keep_to_one_thread()
    from glm5next_plugin.adapters.megatron.convert import convert as run

    console = Console(stderr=True)
    started = time.monotonic()
    try:
        with byte_progress(console) as progress:
            run(
                source,
                target,
                to=to.value if to else None,
                fp8=fp8,
                dtype=dtype.value if dtype else None,
                base=base,
                workers=workers,
                max_shard_bytes=int(max_shard_size * 1e9),
                verify=verify,
                resume=resume,
                overwrite=overwrite,
                progress=progress,
            )
    except KeyboardInterrupt:
        console.print("interrupted; the same command with --resume goes on")
        raise typer.Exit(130) from None
    console.print(f"{target} written in {time.monotonic() - started:.0f} s", highlight=False, soft_wrap=True)
