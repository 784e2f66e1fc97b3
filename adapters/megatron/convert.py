"""A checkpoint in any format and spelling to a torch_dist or a released one, streamed; no Megatron needed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from glm5next_plugin.checkpoint.inspection import Inspectable
from glm5next_plugin.checkpoint.job import Progress, run_job
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.released_files import WrittenDtype
from glm5next_plugin.checkpoint.released_target import MAX_SHARD_BYTES, ReleasedTarget
from glm5next_plugin.checkpoint.torch_dist_layout import is_torch_dist
from glm5next_plugin.errors import InputError

from .torch_dist_reader import TorchDistReader
from .torch_dist_target import TorchDistTarget

Format = Literal["torch_dist", "released"]
_DTYPES: dict[torch.dtype, WrittenDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def open_source(path: str | Path, base: str | Path | None = None) -> Inspectable:
    """Open a checkpoint in either format; nothing is checked yet.

    Args:
        path: safetensors checkpoint in any spelling, or torch_dist directory.
        base: of a torch_dist directory without ``hf``, the checkpoint that it was trained from.

    Raises:
        InputError, ConfigError, FileNotFoundError: it is no checkpoint of this model.
    """
    if not Path(path).is_dir():
        raise InputError(f"{path}: no such directory")
    if is_torch_dist(path):
        return TorchDistReader(path, open_source(base) if base is not None else None)
    if base is not None:
        raise InputError(f"{path} is no torch_dist directory: it has its own config, and --base is not for it")
    return CheckpointReader(path)


def refuse_nested(source: str | Path, target: str | Path) -> None:
    """Raise InputError if a job would write over or into its source."""
    where, inside = Path(target).resolve(), Path(source).resolve()
    if where == inside or inside in where.parents or where in inside.parents:
        raise InputError(f"{target} and {source} lie in one another; give a directory apart from the source")


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Format | None = None,
    dtype: WrittenDtype | None = None,
    fp8: bool = False,
    base: str | Path | None = None,
    workers: int = 1,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> None:
    """Write ``source`` in another format as the directory ``target``, which appears when it is complete.

    Args:
        source: checkpoint in any spelling, BF16, FP32 or FP8, or torch_dist directory.
        target: directory to make.
        to: its format; the other one than the source's if left out.
        dtype: of every tensor that is not one of the five fp32 kinds; if left out the source's, bfloat16 where that is
            FP8.
        fp8: quantise what the FP8 release has as FP8.
        base: of a torch_dist directory without ``hf``, the checkpoint that it was trained from.
        workers: at most this many processes.
        max_shard_bytes: a safetensors file is closed before it would grow beyond this.
        overwrite: replace a directory that is not empty, and discard what an interrupted conversion left.
        resume: go on with what an interrupted conversion left.
        verify: compare what was written with the source, tensor by tensor, before it takes its name.
        progress: called as the conversion gets on.

    Raises:
        InputError: a fault of the source, an occupied target, too little room, a file that cannot be written.
    """
    refuse_nested(source, target)
    opened = open_source(source, base)
    to = to or ("released" if is_torch_dist(source) else "torch_dist")
    if fp8 and to != "released":
        raise InputError("a torch_dist checkpoint has no FP8 weights; quantise where it is exported")
    opened.check()
    dtype = dtype or _DTYPES[opened.dtype]
    if to == "torch_dist":
        written = TorchDistTarget(opened, dtype=getattr(torch, dtype), workers=workers)
    else:
        written = ReleasedTarget(opened, dtype=dtype, fp8=fp8, workers=workers, max_shard_bytes=max_shard_bytes)
    run_job(opened, written, target, overwrite=overwrite, resume=resume, verify=verify, progress=progress)
