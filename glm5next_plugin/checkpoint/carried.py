"""Tensors that no Megatron parameter holds (vision and MTP), kept beside a distributed checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .header import HeaderError, read_header
from .stored import StoredTensor, TensorFiles
from .weight_map import read_weight_map

INDEX = "carried.index.json"


def carried_name(number: int) -> str:
    """Name of a file of carried tensors."""
    return f"carried-{number:05d}.safetensors"


class CarriedTensors(Mapping[str, StoredTensor]):
    """The carried tensors of a directory by released name. It can be pickled.

    Attributes:
        faults: what is wrong with index and files.

    Raises:
        InputError: the index cannot be read.
    """

    def __init__(self, directory: Path):
        self._files = TensorFiles(directory)
        self._stored: dict[str, StoredTensor] = {}
        index, self.faults = read_weight_map(directory / INDEX)
        for file in sorted(set(index.values())):
            try:
                entries = read_header(directory / file)
            except (OSError, HeaderError) as error:
                self.faults.append(f"{file}: {error}")
                continue
            for entry in entries:
                self._stored[entry.name] = StoredTensor(file, entry.name, entry.start, entry.dtype, entry.shape)
        self.faults += [f"{name} is not in {index[name]}" for name in index if name not in self._stored]
        self.faults += [f"{name} is not in {INDEX}" for name in self._stored if name not in index]

    def __getitem__(self, name: str) -> StoredTensor:
        return self._stored[name]

    def __iter__(self):
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def tensor(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a tensor in its stored dtype.

        Raises:
            InputError: it cannot be read, or has a value that is not finite.
        """
        stored = self._stored[name]
        return self._files.require_finite(self._files.read(stored, rows, into), name, stored)


def write_carried_index(directory: Path, files: Mapping[str, str]) -> None:
    """Write which file holds which carried tensor; it is there even if there are none."""
    content: dict[str, Any] = {"weight_map": dict(sorted(files.items()))}
    (directory / INDEX).write_text(json.dumps(content, indent=2) + "\n")
