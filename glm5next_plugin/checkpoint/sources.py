"""What a conversion, a slice or a comparison reads from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from glm5next_plugin.architecture import Architecture


class StoredSpec(Protocol):
    """What a source knows of a tensor without reading it: dtype as headers spell it, and shape."""

    dtype: str
    shape: tuple[int, ...]


class Source(Protocol):
    """Tensors by released name. :class:`.reading.CheckpointReader` is one, and can be pickled as all are.

    Attributes:
        architecture: the model.
        fp8_block: block size of the FP8 weights in it, if there are any.
    """

    architecture: Architecture
    fp8_block: tuple[int, int] | None

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype for a model that loses no bit."""

    def names(self) -> list[str]:
        """Released names of the tensors that are there, in the inventory's order, scales left out."""

    def spec(self, name: str) -> StoredSpec:
        """Stored dtype and shape of a tensor."""

    def tensor(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a tensor, FP8 dequantised to bfloat16; every value is finite."""

    def quantised(
        self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 weight and scale as stored."""

    def check(self) -> None:
        """Raise InputError with every fault that shows without reading a tensor."""

    def identity(self) -> dict[str, Any]:
        """What tells this state of the source from another, for a job that goes on later."""

    @property
    def companions(self) -> Path:
        """The directory with config.json, tokenizer and generation files."""
