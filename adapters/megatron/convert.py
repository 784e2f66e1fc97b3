"""A released checkpoint to Megatron's torch_dist format and back, on one process and no GPU.

The layout of the torch_dist side is :mod:`glm5next_plugin.checkpoint.torch_dist_layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint import torch_dist_layout as layout
from glm5next_plugin.checkpoint.staging import staged_directory

from .bridge import Glm5NextBridge
from .export import DTYPE_NAMES, carried_tensors, write_released
from .provider import Glm5NextProvider
from .released_source import ReleasedSource
from .runtime import initialize
from .torch_dist import load_torch_dist, save_torch_dist


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
        (staging / layout.RELEASE).mkdir()
        save_torch_dist(models, staging / layout.RELEASE)
        progress("carrying over vision and MTP tensors, tokenizer and config")
        released.reader.copy_companions(staging / layout.COMPANIONS)
        save_file(dict(carried_tensors(released.reader)), staging / layout.COMPANIONS / layout.CARRIED)
        (staging / layout.MARKER).write_text(layout.RELEASE)


def to_released(source: str | Path, target: str | Path, *, progress: Callable[[str], None], overwrite: bool) -> None:
    """Export what :func:`to_torch_dist` wrote (weights possibly trained on since) in the released spelling.

    Args:
        source: torch_dist directory; its marker file says which checkpoint counts.
        target: directory to make; it appears when it is complete.
        progress: called with a line as each stage starts.
        overwrite: replace a directory that is not empty.

    Raises:
        InputError: the source is incomplete, or an occupied target.
    """
    source = Path(source)
    weights, companions = layout.weights_directory(source), source / layout.COMPANIONS
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
        carried=load_file(companions / layout.CARRIED).items(),
        companions=companions,
        dtype=DTYPE_NAMES[dtype],
        overwrite=overwrite,
    )


def _build(architecture: Architecture, dtype: torch.dtype) -> list:
    initialize()
    provider = Glm5NextProvider.from_architecture(architecture, perform_initialization=False)
    provider.apply_overrides_and_finalize(dtype=dtype)
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def _stored_dtype(weights: Path) -> torch.dtype:
    from megatron.core.dist_checkpointing import load_tensors_metadata

    return load_tensors_metadata(str(weights))["embedding.word_embeddings.weight"].dtype
