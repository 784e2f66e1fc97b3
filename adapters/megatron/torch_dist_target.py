"""A torch_dist checkpoint as a job's target: what megatron-core would have saved, written without it.

Every tensor is a chunk as megatron-core divides it at TP 1 (gate and up apart, an expert at a time); large ones are
divided further along their rows. A distributed checkpoint loads in every layout whatever its chunks are.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.checkpoint import torch_dist_layout as layout
from glm5next_plugin.checkpoint.carried import carried_name, write_carried_index
from glm5next_plugin.checkpoint.companions import copy_companions
from glm5next_plugin.checkpoint.comparing import compare
from glm5next_plugin.checkpoint.dtypes import TORCH_DTYPES
from glm5next_plugin.checkpoint.files import WriteFile, aligned_memory
from glm5next_plugin.checkpoint.header import encode_header, tensor_bytes
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.checkpoint.pieces import Granularity, Piece, Unit, group, split_rows
from glm5next_plugin.checkpoint.sources import Source
from glm5next_plugin.checkpoint.torch_dist_format import Chunk, WrittenTensor, stream_bytes, write_metadata
from glm5next_plugin.checkpoint.workers import Advance

from .names import extra_state_keys, placements
from .run_config import write_run_config
from .torch_dist_reader import TorchDistReader

_ALIGNMENT = 64
_OBJECTS = "objects.distcp"
COMMON_STATE = {"checkpoint_version": 3.0, "iteration": 0}


class TorchDistTarget:
    """Writes a directory as :mod:`glm5next_plugin.checkpoint.torch_dist_layout` describes it.

    Args:
        source: every tensor of the text model; its vision and MTP tensors are carried along.
        dtype: bfloat16 or float32, of every tensor that is not one of the five fp32 kinds.
        workers: at most this many processes.
    """

    def __init__(self, source: Source, *, dtype: torch.dtype, workers: int = 1):
        self.architecture = source.architecture
        self._dtype = dtype
        self._placements = placements(self.architecture)
        self._specs = expected_tensors(self.architecture)
        names = source.names()
        self._stored_as = {name: self._storage(name) for name in names}
        sizes = {name: tensor_bytes(self._stored_as[name], self._specs[name].shape) for name in names}
        granularity = Granularity.of(sizes, workers)
        self.workers = granularity.workers
        self.units = group(
            self._pieces(sizes, source, granularity.piece_bytes),
            granularity.unit_bytes,
            apart=lambda before, after: self._is_text(before) != self._is_text(after),
        )
        self.kind = {"format": "torch_dist", "dtype": str(self._dtype), "units": [unit.nbytes for unit in self.units]}

    def _storage(self, name: str) -> str:
        if self._specs[name].dtype == "F32" or self._dtype == torch.float32:
            return "F32"
        return "BF16"

    def _pieces(self, sizes: dict[str, int], source: Source, limit: int) -> Iterator[Piece]:
        for name, nbytes in sizes.items():
            spec = self._specs[name]
            multiple = source.fp8_block[0] if source.fp8_block is not None and spec.fp8 else 1
            # safetensors has no part of a tensor: what is carried along stays whole
            limit_of_name = limit if name in self._placements else nbytes
            yield from split_rows(name, spec.shape, nbytes, limit_of_name, multiple=multiple)

    def _is_text(self, piece: Piece) -> bool:
        return piece.name in self._placements

    # ------------------------------------------------------------------ writing
    def prepare(self, directory: Path) -> None:
        (directory / layout.RELEASE).mkdir(exist_ok=True)
        (directory / layout.COMPANIONS).mkdir(exist_ok=True)

    def write(self, unit: Unit, source: Source, directory: Path, advance: Advance) -> list[tuple[int, int]]:
        """Write a unit as a file of its own; start and bytes of each stream in it."""
        memory = aligned_memory(max(stream_bytes("F32", piece.shape) for piece in unit.pieces))
        path = directory / self._file(unit)
        path.write_bytes(b"")
        places = []
        with contextlib.closing(WriteFile(path)) as file:
            if not self._is_text(unit.pieces[0]):
                file.write(self._carried_header(unit))
            for piece in unit.pieces:
                tensor = source.tensor(piece.name, slice(*piece.rows), into=memory)
                tensor = tensor.to(TORCH_DTYPES[self._stored_as[piece.name]])
                if self._is_text(piece):
                    file.write(bytes(-file.tell() % _ALIGNMENT))  # as the values are in a stream
                start = file.tell()
                if self._is_text(piece):
                    # of its own storage, since torch.save writes all of one
                    own = torch.frombuffer(tensor.reshape(-1).view(torch.uint8).numpy(), dtype=tensor.dtype)
                    leading = (1,) * (len(self._placements[piece.name].box) - tensor.dim())
                    torch.save(own.view(*leading, *tensor.shape), file)
                else:
                    file.write_tensor(tensor)
                places.append((start, file.tell() - start))
                advance(piece.nbytes)
        return places

    def _file(self, unit: Unit) -> str:
        if self._is_text(unit.pieces[0]):
            return f"{layout.RELEASE}/__{unit.number}_0.distcp"
        return f"{layout.COMPANIONS}/{carried_name(unit.number)}"

    def _carried_header(self, unit: Unit) -> bytes:
        header, _ = encode_header((piece.name, self._stored_as[piece.name], piece.shape) for piece in unit.pieces)
        return header

    def finish(self, directory: Path, source: Source, records: list[Any]) -> None:
        chunks: dict[str, list[Chunk]] = {}
        for unit, places in zip(self.units, records, strict=True):
            if self._is_text(unit.pieces[0]):
                file = Path(self._file(unit)).name
                for piece, (start, nbytes) in zip(unit.pieces, places, strict=True):
                    placement = self._placements[piece.name]
                    chunks.setdefault(placement.key, []).append(self._chunk(piece, file, start, nbytes))
        tensors = {}
        for name, placement in self._placements.items():
            dtype = TORCH_DTYPES[self._stored_as[name]]
            tensors[placement.key] = WrittenTensor(placement.shape, dtype, chunks[placement.key])
        weights = directory / layout.RELEASE
        write_metadata(weights, tensors, self._write_objects(weights))
        companions = directory / layout.COMPANIONS
        shutil.copyfile(source.companions / "config.json", companions / "config.json")
        copy_companions(source.companions, companions)
        write_carried_index(companions, self._carried_files())
        write_run_config(weights, self.architecture, self._dtype)
        (directory / layout.MARKER).write_text(layout.RELEASE)

    def _chunk(self, piece: Piece, file: str, start: int, nbytes: int) -> Chunk:
        placement = self._placements[piece.name]
        offset, shape = list(placement.offset), list(placement.box)
        dim = len(shape) - len(piece.shape)  # of the rows: after the one that counts experts
        offset[dim] += piece.rows[0]
        shape[dim] = piece.rows[1] - piece.rows[0]
        return Chunk(tuple(offset), tuple(shape), file, start, nbytes)

    def _carried_files(self) -> dict[str, str]:
        carried = [unit for unit in self.units if not self._is_text(unit.pieces[0])]
        return {piece.name: Path(self._file(unit)).name for unit in carried for piece in unit.pieces}

    def _write_objects(self, weights: Path) -> dict[str, tuple[str, int, int]]:
        """The state that is no tensor, each a list of one object: none of each linear, and what all ranks share."""
        objects: dict[str, Any] = dict.fromkeys(extra_state_keys(self.architecture))
        objects["common_state/shard_0_1"] = COMMON_STATE
        places = {}
        with (weights / _OBJECTS).open("wb") as stream:
            for key, value in objects.items():
                start = stream.tell()
                torch.save([value], stream)
                places[key] = (_OBJECTS, start, stream.tell() - start)
        return places

    # ------------------------------------------------------------------ verifying
    def verify(self, directory: Path, source: Source, progress: Advance) -> None:
        written = TorchDistReader(directory)
        written.check()
        compare(source, written, workers=self.workers, progress=progress).require_equal(directory)
