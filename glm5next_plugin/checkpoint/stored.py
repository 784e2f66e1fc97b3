"""Tensors in safetensors files: where each lies, and reading them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.errors import InputError

from .dtypes import TORCH_DTYPES
from .files import ReadFile
from .finite import count_not_finite
from .header import tensor_bytes


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a released tensor lies and what its file's header says of it.

    Attributes:
        file: name of the file in the checkpoint directory.
        stored: name in that file; a merged tensor holds several released ones.
        start: where its bytes start in the file.
        dtype: as the header spells it.
        shape: of the released tensor.
    """

    file: str
    stored: str
    start: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.stored} in {self.file}"


class TensorFiles:
    """The files of a directory, opened when they are first read. It can be pickled."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, ReadFile] = {}

    def read(self, stored: StoredTensor, rows: slice | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a tensor in its stored dtype, in new memory or in that of :func:`.files.aligned_memory`.

        Raises:
            InputError: it cannot be read.
        """
        if stored.dtype not in TORCH_DTYPES:
            needed = " or ".join(TORCH_DTYPES)
            raise InputError(f"{self._directory}: {stored} has dtype {stored.dtype}; needed: {needed}")
        start, shape = stored.start, stored.shape
        if rows is not None:
            start += tensor_bytes(stored.dtype, (rows.start, *shape[1:]))
            shape = (rows.stop - rows.start, *shape[1:])
        try:
            if stored.file not in self._files:
                self._files[stored.file] = ReadFile(self._directory / stored.file)
            memory = self._files[stored.file].read(start, tensor_bytes(stored.dtype, shape), into)
        except (OSError, EOFError) as error:
            raise InputError(f"{self._directory}: {stored} cannot be read: {error}") from error
        dtype = TORCH_DTYPES[stored.dtype]
        if memory.storage_offset() % dtype.itemsize:  # after an FP8 tensor of odd size
            memory = memory.clone()
        return memory.view(dtype).view(shape)

    def require_finite(self, tensor: torch.Tensor, name: str, stored: StoredTensor) -> torch.Tensor:
        """The tensor, which is what was read as ``name``.

        Raises:
            InputError: a value is NaN or infinite.
        """
        bad = count_not_finite(tensor)
        if bad:
            raise InputError(f"{self._directory}: {name} ({stored}) has {bad} values that are NaN or infinite")
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"_directory": self._directory, "_files": {}}
