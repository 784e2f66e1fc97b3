"""A torch_dist checkpoint of the model by released names, in whatever layout it was saved; no Megatron needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint import torch_dist_layout as layout
from glm5next_plugin.checkpoint.carried import CarriedTensors
from glm5next_plugin.checkpoint.dtypes import STORED_DTYPES, TORCH_DTYPES
from glm5next_plugin.checkpoint.faults import raise_faults
from glm5next_plugin.checkpoint.finite import count_not_finite
from glm5next_plugin.checkpoint.inspection import Inspectable
from glm5next_plugin.checkpoint.inventory import expected_tensors, split_layer
from glm5next_plugin.checkpoint.torch_dist_format import METADATA, DistributedTensors
from glm5next_plugin.errors import InputError

from .names import LAYER, placements

# what a training framework saves beside the weights
_NO_WEIGHTS = ("optimizer.", "opt_param_scheduler", "rng_state", "rerun_state", "chained_")
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclasses.dataclass(frozen=True)
class DistributedSpec:
    """Stored dtype, as headers spell it, and shape of a released tensor."""

    dtype: str
    shape: tuple[int, ...]


class TorchDistReader:
    """What :mod:`glm5next_plugin.checkpoint.torch_dist_layout` describes, as a source of tensors.

    Args:
        path: a directory of that layout, or the distributed checkpoint in it.
        base: gives config, tokenizer, vision and MTP tensors of a checkpoint that has no ``hf`` directory, as training
            frameworks write it.

    Attributes:
        path: the directory.
        companions: directory with config.json, tokenizer and generation files.
        architecture: of that config.json.
        fp8_block: block size of FP8 weights of the base.

    Raises:
        InputError: the directory is no such checkpoint, or incomplete.
        ConfigError: its config is not of this model.
    """

    format = "torch_dist"

    def __init__(self, path: str | Path, base: Inspectable | None = None):
        self.path = Path(path)
        self._weights = layout.weights_directory(self.path)
        companions = layout.companions_directory(self.path)
        if base is None and companions is None:
            raise InputError(
                f"{self.path} has no {layout.COMPANIONS}/config.json; name the checkpoint that it was trained from "
                "with --base, for its config, tokenizer, vision and MTP tensors"
            )
        self.companions: Path = base.companions if base is not None else companions
        self.architecture = Architecture.from_pretrained(self.companions)
        self._tensors = DistributedTensors(self._weights)
        self._placements = placements(self.architecture)
        self._expected = expected_tensors(self.architecture)
        # it has no FP8 weights; those of the base come dequantised, block by block
        self.fp8_block = base.fp8_block if base is not None else None
        self._base = base
        self._carried = None if base is not None else CarriedTensors(self.companions)
        carried = set(base.names() if base is not None else self._carried) - self._placements.keys()
        self._names = [
            name
            for name in self._expected
            if name in carried or (name in self._placements and self._key(name) in self._tensors.tensors)
        ]

    def _key(self, name: str) -> str:
        return self._placements[name].key

    def names(self) -> list[str]:
        """Released names of the tensors that are there, in the inventory's order."""
        return list(self._names)

    def spec(self, name: str) -> DistributedSpec:
        """Stored dtype and shape of a tensor.

        Raises:
            InputError: no such tensor.
        """
        if name in self._placements:
            if self._key(name) not in self._tensors.tensors:
                raise InputError(f"{self.path}: no tensor {name}")
            dtype = self._tensors.tensors[self._key(name)].dtype
            return DistributedSpec(STORED_DTYPES[dtype], self._expected[name].shape)
        stored = self._base.spec(name) if self._base is not None else self._carried[name]
        dequantised = self._base is not None and stored.dtype == "F8_E4M3"
        return DistributedSpec("BF16" if dequantised else stored.dtype, stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, as of every weight that is none of the five fp32 kinds."""
        return TORCH_DTYPES[self.spec("model.language_model.embed_tokens.weight").dtype]

    def tensor(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a tensor in its stored dtype.

        Args:
            name: released name.
            rows: run of the first dimension; all of it if left out.
            into: :func:`.files.aligned_memory` to read into; the tensor is good until it is used again.

        Raises:
            InputError: no such tensor, one that cannot be read, or a value that is not finite.
        """
        if name not in self._placements:
            carried = self._base if self._base is not None else self._carried
            return carried.tensor(name, rows, into=into)
        shape = self.spec(name).shape
        rows = rows or slice(0, shape[0])
        placement = self._placements[name]
        dim = len(placement.box) - len(shape)
        offset, box = list(placement.offset), list(placement.box)
        offset[dim] += rows.start
        box[dim] = rows.stop - rows.start
        tensor = self._tensors.read(placement.key, tuple(offset), tuple(box), into=into).view(box[dim:])
        bad = count_not_finite(tensor)
        if bad:
            files = " and ".join(self._tensors.files_of(placement.key, tuple(offset), tuple(box)))
            where = f"{self._weights}: {placement.key} in {files} ({name})"
            raise InputError(f"{where} has {bad} values that are NaN or infinite")
        return tensor

    def quantised(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None):
        """Never: no weight is FP8."""
        raise InputError(f"{self.path}: {name} is {self.spec(name).dtype}, not FP8")

    def check(self) -> None:
        """Compare metadata, files and inventory; no tensor is read.

        Raises:
            InputError: every fault with its key (the first 20 in full).
        """
        raise_faults(self.path, self.faults())

    def faults(self) -> list[str]:
        """What is wrong with keys, shapes, dtypes, chunks and files."""
        stored = self._tensors.tensors
        faults = self._base.faults() if self._base is not None else self._carried_faults()
        wanted = {placement.key: (name, placement) for name, placement in self._placements.items()}
        for key, (name, placement) in wanted.items():
            if key not in stored:
                faults.append(f"{key} is missing in {METADATA} ({name})")
                continue
            found, needed = stored[key].shape, placement.shape
            padded = key in _PADDED and found[1:] == needed[1:] and found[0] >= needed[0]
            if found != needed and not padded:
                faults.append(f"{key} has shape {list(found)}; needed by config.json: {list(needed)}")
            if stored[key].dtype not in self._legal_dtypes(name):
                legal = " or ".join(map(str, self._legal_dtypes(name)))
                faults.append(f"{key} has dtype {stored[key].dtype}; needed: {legal}")
        unknown = [key for key in stored if key not in wanted and not key.startswith(_NO_WEIGHTS)]
        faults += [f"{key} is unknown{self._hint(key)}" for key in sorted(unknown)]
        return faults + self._tensors.faults(key for key in wanted if key in stored)

    def identity(self) -> dict[str, Any]:
        """What tells this state of the checkpoint from another: its files with their sizes and times."""
        files = sorted(file for folder in (self._weights, self.companions) for file in folder.iterdir())
        return {
            "path": str(self._weights.resolve()),
            "companions": str(self.companions.resolve()),
            "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        }

    def scales(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """None: no weight is FP8."""
        return {}

    def files(self) -> dict[str, int]:
        """Bytes of each file with tensors."""
        held = {self._weights / file for file in self._tensors.files()}
        held |= {self.companions / stored.file for stored in (self._carried or {}).values()}
        return {str(file): file.stat().st_size for file in sorted(held) if file.is_file()}

    def _carried_faults(self) -> list[str]:
        """Vision and MTP: whole or not at all, of the shapes of the config."""
        faults = list(self._carried.faults)
        groups = {self._expected[name].group for name in self._names if name not in self._placements}
        for name, spec in self._expected.items():
            if name not in self._placements and spec.group in groups:
                if name not in self._names:
                    faults.append(f"{name} is missing ({spec.dtype} {list(spec.shape)})")
                    continue
                found = self.spec(name)
                if tuple(found.shape) != spec.shape:
                    faults.append(f"{name} has shape {list(found.shape)}; needed: {list(spec.shape)}")
                if TORCH_DTYPES.get(found.dtype) not in self._legal_dtypes(name):
                    legal = " or ".join(STORED_DTYPES[dtype] for dtype in self._legal_dtypes(name))
                    faults.append(f"{name} has dtype {found.dtype}; needed: {legal}")
        unknown = set(self._carried) - self._expected.keys()
        return faults + [f"{name} ({self._carried[name]}) is unknown" for name in sorted(unknown)]

    def _legal_dtypes(self, name: str) -> tuple[torch.dtype, ...]:
        return (torch.float32,) if self._expected[name].dtype == "F32" else (torch.bfloat16, torch.float32)

    def _hint(self, key: str) -> str:
        number, _ = split_layer(key, LAYER.partition("*")[0])
        layers = self.architecture.num_hidden_layers
        return f": config.json has {layers} layers" if number is not None and number >= layers else ""
