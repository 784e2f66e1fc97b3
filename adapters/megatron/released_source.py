"""What Megatron-Bridge reads weights and names from: our checkpoint reader, behind the interface of its wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.errors import InputError


def checkpoint_directory(hf_pretrained: Any) -> Path | None:
    """The local directory behind a Megatron-Bridge ``PreTrained*`` wrapper, if it holds a checkpoint."""
    path = getattr(hf_pretrained, "model_name_or_path", None)
    if path is None:
        return None
    directory = Path(path)
    return directory if (directory / "config.json").is_file() else None


class _ReadTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by released name, read when asked for."""

    def __init__(self, reader: CheckpointReader):
        self._reader = reader
        self.source = self

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.names())

    def __len__(self) -> int:
        return len(self._reader.names())

    def get_all_keys(self) -> list[str]:
        """Every released name in the checkpoint."""
        return self._reader.names()


class _ExpectedNames(Mapping[str, torch.Tensor]):
    """The names of the text model alone, for an export that has no source of weights."""

    def __init__(self, architecture: Architecture):
        self._names = list(expected_tensors(architecture, vision=False, mtp=False))
        self.source = self

    def __getitem__(self, name: str) -> torch.Tensor:
        raise KeyError(f"{name}: an export has no source to read it from")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def get_all_keys(self) -> list[str]:
        """Every text name, in writing order."""
        return self._names


class ReleasedSource:
    """Stands where Megatron-Bridge expects a ``PreTrainedCausalLM``: config, path and lazily read state.

    Attributes:
        architecture: of the checkpoint.
        reader: the open checkpoint, or ``None`` for :meth:`names_only`.
    """

    def __init__(self, architecture: Architecture, state: Mapping[str, torch.Tensor], reader: CheckpointReader | None):
        self.architecture = architecture
        self.config = architecture.raw
        self.model_name_or_path = str(reader.path) if reader else None
        self.state = state
        self.reader = reader

    @classmethod
    def open(cls, directory: str | Path) -> ReleasedSource:
        """Open and check a checkpoint directory, in any spelling.

        Raises:
            InputError: every fault of the checkpoint, by file and tensor.
        """
        reader = CheckpointReader(directory)
        reader.check()
        return cls(reader.architecture, _ReadTensors(reader), reader)

    @classmethod
    def of(cls, hf_pretrained: Any) -> ReleasedSource:
        """Open the checkpoint behind a wrapper of Megatron-Bridge.

        Raises:
            InputError: the wrapper has no local directory, or the checkpoint is at fault.
        """
        if isinstance(hf_pretrained, ReleasedSource):
            return hf_pretrained
        directory = checkpoint_directory(hf_pretrained)
        if directory is None:
            raise InputError(
                f"{getattr(hf_pretrained, 'model_name_or_path', hf_pretrained)!r} is no local checkpoint directory; "
                "download the checkpoint and give its path"
            )
        return cls.open(directory)

    @classmethod
    def names_only(cls, architecture: Architecture) -> ReleasedSource:
        """For exporting weights whose source checkpoint is not at hand."""
        return cls(architecture, _ExpectedNames(architecture), None)
