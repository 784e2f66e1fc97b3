"""Reading a checkpoint directory: any spelling in, released names out, nothing read before it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

from .faults import raise_faults
from .fp8 import block_size, dequantize_block
from .header import tensor_bytes
from .inventory import FP32_KINDS, SCALE_SUFFIX, TensorSpec, expected_tensors, scale_shape, split_layer
from .shards import read_shards
from .spelling import Spelling, released_parts, spelling_of
from .stored import StoredTensor, TensorFiles

_CONVOLUTIONS = (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")


class CheckpointReader:
    """A checkpoint directory by released names.

    Opening it reads config.json, the index and the headers. :meth:`check` compares them with the inventory;
    :meth:`tensor` reads one tensor. It can be pickled, so that another process need not read the headers again.

    Attributes:
        path: the directory.
        architecture: the model that config.json tells of.
        fp8_block: block size of its FP8 weights, None for a checkpoint without quantization_config.
        spelling: spellings that its names show; ``{"released"}`` where none shows another.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ConfigError: config.json is not of this model.
        InputError: no tensors, or none that can be read.
    """

    format = "safetensors"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: no such directory")
        self.architecture = Architecture.from_pretrained(self.path)
        self.fp8_block = block_size(self.architecture.raw)
        shards = read_shards(self.path)
        self._faults = shards.faults
        self._stored: dict[str, StoredTensor] = {}
        self._scales: dict[str, StoredTensor] = {}
        self._files = TensorFiles(self.path)
        self._held = sorted(shards.headers)
        spellings: set[Spelling] = set()
        for file, entries in shards.headers.items():
            for entry in entries:
                spellings |= spelling_of(entry.name)
                try:
                    parts = released_parts(entry.name, entry.shape)
                except ValueError as error:
                    self._faults.append(f"{entry.name} in {file}: {error}")
                    continue
                for part in parts:
                    start = entry.start + tensor_bytes(entry.dtype, (part.start,))
                    self._place(part.name, StoredTensor(file, entry.name, start, entry.dtype, part.shape))
        self.spelling: frozenset[Spelling] = frozenset(spellings or {"released"})
        if not self._stored:
            raise_faults(self.path, self._faults or ["no file holds a tensor"])
        self._expected = expected_tensors(self.architecture)
        self._names = [name for name in self._expected if name in self._stored]
        self._names += sorted(self._stored.keys() - self._expected.keys())

    def names(self) -> list[str]:
        """Released names of the tensors that are there, in the inventory's order, scales left out."""
        return list(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def spec(self, name: str) -> StoredTensor:
        """Where a tensor lies, its stored dtype and its shape.

        Raises:
            InputError: no such tensor.
        """
        if name not in self._stored:
            raise InputError(f"{self.path}: no tensor {name}")
        return self._stored[name]

    @property
    def has_vision(self) -> bool:
        """Whether any tensor of the vision tower is there."""
        return any(self._group(name) == "vision" for name in self._names)

    @property
    def has_mtp(self) -> bool:
        """Whether any tensor of an MTP layer is there."""
        return any(self._group(name) == "mtp" for name in self._names)

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype for a model that loses no bit: bfloat16, or float32 where a weight is stored so.

        The kinds that are always fp32 do not count, nor do the convolutions, which transformers saves in fp32 from
        bf16 weights.
        """
        wide = any(
            stored.dtype == "F32" and not name.endswith((*FP32_KINDS, *_CONVOLUTIONS))
            for name, stored in self._stored.items()
        )
        return torch.float32 if wide else torch.bfloat16

    def tensor(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """One tensor on the CPU in its stored dtype; an FP8 weight comes dequantised, as bfloat16.

        Args:
            name: released name.
            rows: run of the first dimension; all of it if left out. Of an FP8 weight it starts where a block does.
            into: :func:`.files.aligned_memory` to read into instead of new memory; the tensor is good until it is used
                again.

        Raises:
            InputError: no such tensor, one that cannot be read, an FP8 weight without a usable scale, or a value that
                is not finite.
        """
        stored = self.spec(name)
        if stored.dtype != "F8_E4M3":
            return self._files.require_finite(self._files.read(stored, rows, into), name, stored)
        weight, scale = self._read_quantised(name, rows, into)
        matrix = dequantize_block(weight, scale, self.fp8_block).to(torch.bfloat16)
        return self._files.require_finite(matrix, name, stored)

    def quantised(
        self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 weight and scale as they are stored; arguments and errors as for :meth:`tensor`."""
        weight, scale = self._read_quantised(name, rows, into)
        self._files.require_finite(weight, name, self._stored[name])
        self._files.require_finite(scale, name + SCALE_SUFFIX, self._scales[name])
        return weight, scale

    def _read_quantised(
        self, name: str, rows: slice | None, into: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The values are not checked."""
        stored = self.spec(name)
        if stored.dtype != "F8_E4M3":
            raise InputError(f"{self.path}: {name} ({stored}) is {stored.dtype}, not FP8")
        raise_faults(self.path, self._scale_faults(name, stored))
        blocks = None
        if rows is not None:
            height = self.fp8_block[0]
            if rows.start % height:
                raise ValueError(f"{name}: rows from {rows.start} on start within a block of {height} rows")
            blocks = slice(rows.start // height, -(-rows.stop // height))
        return self._files.read(stored, rows, into), self._files.read(self._scales[name], blocks)

    def check(self) -> None:
        """Compare index, headers and inventory; no tensor is read.

        Raises:
            InputError: every fault with its file and tensor (the first 20 in full).
        """
        raise_faults(self.path, self.faults())

    def faults(self) -> list[str]:
        """What is wrong with index, headers and names, each with its file and tensor; no tensor is read.

        The vision tower and the MTP layers may be absent as a whole, never in part.
        """
        faults = list(self._faults)
        absent = {group for group, there in (("vision", self.has_vision), ("mtp", self.has_mtp)) if not there}
        for name, spec in self._expected.items():
            stored = self._stored.get(name)
            if stored is None:
                if spec.group not in absent:
                    faults.append(f"{name} is missing ({spec.dtype} {list(spec.shape)})")
                continue
            if stored.shape != spec.shape:
                needed = f"needed by config.json: {list(spec.shape)}"
                faults.append(f"{name} ({stored}) has shape {list(stored.shape)}; {needed}")
            if stored.dtype not in _legal_dtypes(spec):
                legal = " or ".join(_legal_dtypes(spec))
                faults.append(f"{name} ({stored}) has dtype {stored.dtype}; needed: {legal}")
            elif stored.dtype == "F8_E4M3":
                faults += self._scale_faults(name, stored)
        for name in sorted(self._stored.keys() - self._expected.keys()):
            faults.append(f"{name} ({self._stored[name]}) is unknown{self._hint(name)}")
        for name, scale in self._scales.items():
            weight = self._stored.get(name)
            if weight is None:
                faults.append(f"{scale} is a scale without its weight")
            elif weight.dtype != "F8_E4M3":
                faults.append(f"{scale} is a scale, but its weight ({weight}) is {weight.dtype}")
        return faults

    def identity(self) -> dict[str, Any]:
        """What tells this state of the checkpoint from another: config and files with their sizes and times."""
        stats = {file: (self.path / file).stat() for file in ("config.json", *self._held)}
        return {
            "path": str(self.path.resolve()),
            "files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
        }

    def scales(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the scale of each FP8 weight, by the weight's name."""
        return {name: (scale.dtype, scale.shape) for name, scale in self._scales.items()}

    def files(self) -> dict[str, int]:
        """Bytes of each file with tensors."""
        return {file: (self.path / file).stat().st_size for file in self._held}

    @property
    def companions(self) -> Path:
        """The directory with config, tokenizer and generation files."""
        return self.path

    # ------------------------------------------------------------------ opening
    def _place(self, name: str, found: StoredTensor) -> None:
        table, key = self._stored, name
        if name.endswith(SCALE_SUFFIX):
            table, key = self._scales, name.removesuffix(SCALE_SUFFIX)
        if key in table:
            self._faults.append(f"{name} is there twice: {table[key]}, and {found}")
        else:
            table[key] = found

    # ------------------------------------------------------------------ checking
    def _group(self, name: str) -> str | None:
        return self._expected[name].group if name in self._expected else None

    def _scale_faults(self, name: str, weight: StoredTensor) -> list[str]:
        scale = self._scales.get(name)
        if scale is None:
            return [f"{name} ({weight}) is FP8 without {name}{SCALE_SUFFIX}"]
        if self.fp8_block is None:
            return [f"{name} ({weight}) is FP8, but config.json has no quantization_config with a weight_block_size"]
        faults = []
        if scale.dtype != "F32":
            faults.append(f"{scale} has dtype {scale.dtype}; needed: F32")
        wanted = scale_shape(weight.shape, self.fp8_block) if len(weight.shape) == 2 else scale.shape
        if scale.shape != wanted:
            blocks = f"blocks of {list(self.fp8_block)} need {list(wanted)}"
            faults.append(f"{scale} has shape {list(scale.shape)}; {blocks}")
        return faults

    def _hint(self, name: str) -> str:
        number = split_layer(name)[0]
        layers, mtp = self.architecture.num_hidden_layers, self.architecture.num_nextn_predict_layers
        if number is not None and number >= layers + mtp:
            return f": config.json has {layers} layers and {mtp} MTP layers"
        return ""


def _legal_dtypes(spec: TensorSpec) -> tuple[str, ...]:
    if spec.dtype == "F32":
        return ("F32",)
    return ("BF16", "F32", "F8_E4M3") if spec.fp8 else ("BF16", "F32")
