"""A released checkpoint to Megatron's torch_dist format and back, on one process and no GPU.

An import writes, below the target directory::

    latest_checkpointed_iteration.txt   "release"
    release/                            the distributed checkpoint of the text model
    hf/                                 config.json, tokenizer and generation files
    hf/carried.safetensors              vision and MTP tensors, which no Megatron parameter holds

so that an export needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.staging import staged_directory
from glm5next_plugin.errors import InputError

from .bridge import Glm5NextBridge
from .export import DTYPE_NAMES, carried_tensors, write_released
from .provider import Glm5NextProvider
from .released_source import ReleasedSource
from .runtime import initialize
from .torch_dist import load_torch_dist, save_torch_dist

CARRIED = "carried.safetensors"
_MARKER = "latest_checkpointed_iteration.txt"


def is_torch_dist(path: str | Path) -> bool:
    """Whether a directory looks like what :func:`to_torch_dist` writes."""
    return (Path(path) / _MARKER).is_file()


def to_torch_dist(source: str | Path, target: str | Path, *, progress: Callable[[str], None], overwrite: bool) -> None:
    """Import a checkpoint (any of the three spellings) as one that loads in every parallel layout.

    Args:
        source: checkpoint directory.
        target: directory to make; it appears when it is complete.
        progress: called with a line as each stage starts.
        overwrite: replace a directory that is not empty.

    Raises:
        InputError: a fault of the source, or an occupied target.
    """
    released = ReleasedSource.open(source)
    with staged_directory(target, overwrite=overwrite) as staging:
        models = _build(released.architecture, released.reader.dtype)
        progress(f"reading {len(released.state)} tensors")
        Glm5NextBridge().load_weights_hf_to_megatron(released, models)
        progress("writing the distributed checkpoint")
        (staging / "release").mkdir()
        save_torch_dist(models, staging / "release")
        progress("carrying over vision and MTP tensors, tokenizer and config")
        released.reader.copy_companions(staging / "hf")
        save_file(dict(carried_tensors(released.reader)), staging / "hf" / CARRIED)
        (staging / _MARKER).write_text("release")


def to_released(source: str | Path, target: str | Path, *, progress: Callable[[str], None], overwrite: bool) -> None:
    """Export what :func:`to_torch_dist` wrote (weights possibly trained on since) in the released spelling.

    Args:
        source: directory with the layout above; ``latest_checkpointed_iteration.txt`` says which checkpoint counts.
        target: directory to make; it appears when it is complete.
        progress: called with a line as each stage starts.
        overwrite: replace a directory that is not empty.

    Raises:
        InputError: the source is incomplete, or an occupied target.
    """
    source = Path(source)
    weights, companions = _checkpoint_of(source), source / "hf"
    architecture = Architecture.from_pretrained(companions)
    dtype = _stored_dtype(weights)
    models = _build(architecture, dtype)
    progress("reading the distributed checkpoint")
    load_torch_dist(models, weights)
    progress("writing the released spelling")
    stream = Glm5NextBridge().stream_weights_megatron_to_hf(
        models, ReleasedSource.names_only(architecture), cpu=True, show_progress=False
    )
    write_released(
        stream,
        target,
        architecture,
        carried=load_file(companions / CARRIED).items(),
        companions=companions,
        dtype=DTYPE_NAMES[dtype],
        overwrite=overwrite,
    )


def _build(architecture: Architecture, dtype: torch.dtype) -> list:
    initialize()
    provider = Glm5NextProvider.from_architecture(architecture, perform_initialization=False)
    provider.apply_overrides_and_finalize(dtype=dtype)
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def _checkpoint_of(source: Path) -> Path:
    marker = source / _MARKER
    if not marker.is_file():
        raise InputError(f"{source} is no torch_dist checkpoint: it has no {_MARKER}")
    name = marker.read_text().strip()
    weights = source / (name if name == "release" else f"iter_{int(name):07d}")
    for needed in (weights / "metadata.json", source / "hf" / "config.json", source / "hf" / CARRIED):
        if not needed.is_file():
            raise InputError(f"{source} is incomplete: {needed.relative_to(source)} is missing")
    return weights


def _stored_dtype(weights: Path) -> torch.dtype:
    from megatron.core.dist_checkpointing import load_tensors_metadata

    return load_tensors_metadata(str(weights))["embedding.word_embeddings.weight"].dtype
