"""Writing a checkpoint in the released spelling, shard by shard, complete or not at all."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

from .companions import copy_companions
from .faults import raise_faults
from .inventory import expected_tensors
from .released_files import WrittenDtype, index_content, shard_name, write_json, written_config
from .shards import INDEX_NAME
from .staging import staged_directory

__all__ = ["CheckpointWriter", "WrittenDtype"]


class CheckpointWriter:
    """Context manager that writes a checkpoint directory; it appears when the block ends without an error.

    Tensors come in any order; a shard is written as soon as it is full, so no more than one is held in memory. The
    vision tower and the MTP layers are written whole or not at all; without MTP tensors the config says 0 MTP layers.

    Args:
        path: directory to make.
        architecture: the model; gives the expected tensors and config.json.
        max_shard_bytes: a shard is closed before it would grow beyond this.
        dtype: of every tensor that is not one of the five fp32 kinds: ``"bfloat16"``, ``"float32"``, or ``"keep"`` for
            the one that each tensor comes with.
        companions: checkpoint directory whose tokenizer and generation files are copied.
        overwrite: replace a directory that is not empty.

    Raises:
        InputError: on entry, an occupied ``path``; at the end, tensors missing or a file that cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        architecture: Architecture,
        *,
        max_shard_bytes: int = 5 * 1024**3,
        dtype: WrittenDtype = "bfloat16",
        companions: str | Path | None = None,
        overwrite: bool = False,
    ):
        if dtype not in ("bfloat16", "float32", "keep"):
            raise InputError(f"dtype {dtype!r}: a checkpoint is written in 'bfloat16', 'float32' or 'keep'")
        if max_shard_bytes <= 0:
            raise InputError(f"max_shard_bytes {max_shard_bytes}: needed: a positive number of bytes")
        if companions is not None and not Path(companions).is_dir():
            raise InputError(f"{companions}: no such directory to copy tokenizer and generation files from")
        self.path = Path(path)
        self.architecture = architecture
        self._max_shard_bytes = max_shard_bytes
        self._dtype = dtype
        self._companions = Path(companions) if companions is not None else None
        self._overwrite = overwrite
        self._expected = expected_tensors(architecture)
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._written: set[str] = set()

    def __enter__(self) -> CheckpointWriter:
        self._exit = contextlib.ExitStack()
        self._staging = self._exit.enter_context(staged_directory(self.path, overwrite=self._overwrite))
        self._exit.push(self._finish_unless_failed)
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._exit.__exit__(*exception)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; it is copied.

        Args:
            name: released name.
            tensor: on any device, of the inventory's shape. The five fp32 kinds must come as float32, since another
                dtype means that bits are lost already; others as float32 or bfloat16.

        Raises:
            InputError: the name is unknown or came before, or shape or dtype are wrong.
        """
        spec = self._expected.get(name)
        if spec is None:
            raise InputError(f"{self.path}: {name} is no tensor of this model")
        if name in self._written:
            raise InputError(f"{self.path}: {name} was given twice")
        if tuple(tensor.shape) != spec.shape:
            raise InputError(f"{self.path}: {name} has shape {list(tensor.shape)}; needed: {list(spec.shape)}")
        legal = (torch.float32,) if spec.dtype == "F32" else (torch.float32, torch.bfloat16)
        if tensor.dtype not in legal:
            needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in legal)
            raise InputError(
                f"{self.path}: {name} came as {str(tensor.dtype).removeprefix('torch.')}; needed: {needed}"
            )
        dtype = tensor.dtype if self._dtype == "keep" else getattr(torch, self._dtype)
        if spec.dtype == "F32":
            dtype = torch.float32
        copy = torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())
        if self._shard and self._shard_bytes + copy.nbytes > self._max_shard_bytes:
            self._flush()
        self._shard[name] = copy
        self._shard_bytes += copy.nbytes
        self._written.add(name)

    # ------------------------------------------------------------------ files
    def _flush(self) -> None:
        number = len(self._shards) + 1
        file = self._staging / f"shard-{number}"  # renamed at the end, when the count of shards is known
        try:
            save_file(self._shard, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.path}: shard {number} cannot be written to {file}: {error}") from error
        self._shards.append(list(self._shard))
        self._total_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0

    def _finish_unless_failed(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            try:
                self._finish()
            except OSError as error:
                raise InputError(f"{self.path} cannot be written: {error}") from error

    def _finish(self) -> None:
        groups = {self._expected[name].group for name in self._written}
        absent = {"vision", "mtp"} - groups
        raise_faults(
            self.path,
            [
                f"{name} was not given"
                for name, spec in self._expected.items()
                if name not in self._written and spec.group not in absent
            ],
        )
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards, 1):
            file = shard_name(number, len(self._shards))
            (self._staging / f"shard-{number}").rename(self._staging / file)
            weight_map |= dict.fromkeys(names, file)
        index = index_content(weight_map, self._total_bytes)
        config = written_config(self.architecture, dtype=self._dtype, mtp="mtp" in groups)
        if self._companions is not None:
            copy_companions(self._companions, self._staging)
        for name, content in ((INDEX_NAME, index), ("config.json", config)):
            write_json(self._staging / name, content)
        for shard in self._staging.glob("*.safetensors"):  # safetensors makes its files unreadable to other users
            shutil.copymode(self._staging / INDEX_NAME, shard)
