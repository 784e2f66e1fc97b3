"""Megatron's weights to a checkpoint directory in the released spelling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.writing import CheckpointWriter, WrittenDtype
from glm5next_plugin.errors import InputError

from .released_source import ReleasedSource

DTYPE_NAMES: dict[torch.dtype, WrittenDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def save_checkpoint(
    bridge: Any,
    models: list[MegatronModule],
    path: str | Path,
    *,
    dtype: WrittenDtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write the model, whatever its parallel layout, as a checkpoint that transformers and SGLang load. Collective.

    Text tensors come from Megatron; vision and MTP tensors, tokenizer and config from the checkpoint that ``bridge``
    was made from.

    Args:
        bridge: the AutoBridge of the source checkpoint.
        models: the model chunks of this rank, wrapped or not.
        path: directory to make; it appears when it is complete.
        dtype: of every tensor but the five fp32 kinds; the source's if left out.
        overwrite: replace a directory that is not empty.

    Raises:
        InputError: an occupied ``path``, a faulty source, a file that cannot be written; on every rank.
    """
    reader = ReleasedSource.of(bridge.hf_pretrained).reader
    write_released(
        bridge.export_hf_weights(models, cpu=True, show_progress=False),
        path,
        reader.architecture,
        carried=carried_tensors(reader),
        companions=reader.path,
        dtype=dtype or DTYPE_NAMES[reader.dtype],
        overwrite=overwrite,
    )


def carried_tensors(reader: CheckpointReader) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that no Megatron parameter holds: vision and MTP."""
    text = expected_tensors(reader.architecture, vision=False, mtp=False)
    return ((name, reader.tensor(name)) for name in reader.names() if name not in text)


def write_released(
    exported: Iterable[tuple[str, torch.Tensor]],
    path: str | Path,
    architecture: Architecture,
    *,
    carried: Iterable[tuple[str, torch.Tensor]],
    companions: Path,
    dtype: WrittenDtype,
    overwrite: bool = False,
) -> None:
    """Write an export stream and what is carried over. Collective: every rank drains the stream, rank 0 writes.

    Raises:
        InputError: what went wrong on rank 0; on every rank, after the stream has ended, so that none is left waiting.
    """
    if torch.distributed.get_rank() != 0:
        for _ in exported:
            pass
        _agree(None)
        return
    failure = None
    stream = iter(exported)
    try:
        with CheckpointWriter(path, architecture, dtype=dtype, companions=companions, overwrite=overwrite) as writer:
            for name, tensor in stream:
                writer.add(name, tensor)
            for name, tensor in carried:
                writer.add(name, tensor)
    except (InputError, OSError) as error:
        failure = str(error)
        for _ in stream:
            pass
    _agree(failure)


def _agree(failure: str | None) -> None:
    verdict = [failure]
    torch.distributed.broadcast_object_list(verdict, src=0)
    if verdict[0] is not None:
        raise InputError(verdict[0])
