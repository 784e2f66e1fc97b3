"""A checkpoint in the released format as a job's target: every byte's place is known before the first is written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.architecture import Architecture

from .companions import copy_companions
from .comparing import compare
from .dtypes import STORED_DTYPES, TORCH_DTYPES
from .files import WriteFile, aligned_memory
from .fp8 import Block, quantization_config, quantize_block
from .header import Entry, encode_header, tensor_bytes
from .inventory import SCALE_SUFFIX, TensorSpec, expected_tensors, scale_shape
from .pieces import Granularity, Piece, Unit, group, split_rows
from .reading import CheckpointReader
from .released_files import WrittenDtype, index_content, shard_name, write_json, written_config
from .shards import INDEX_NAME
from .sources import Source
from .torch_dist_format import stream_bytes
from .workers import Advance

MAX_SHARD_BYTES = 5 * 1024**3
RELEASED_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file: its first bytes, and where each tensor lies."""

    name: str
    header: bytes
    entries: Mapping[str, Entry]
    nbytes: int


class ReleasedTarget:
    """Writes a checkpoint directory with the names of its source.

    Args:
        source: gives names, shapes and, where they are kept, dtypes.
        dtype: of every tensor that is neither FP8 nor one of the five fp32 kinds: ``"bfloat16"``, ``"float32"``, or
            ``"keep"`` for what the source has, FP8 included.
        fp8: quantise what the inventory says to be FP8; what the source has as FP8 in the same blocks is copied.
        workers: at most this many processes.
        max_shard_bytes: a shard is closed before it would grow beyond this.
    """

    def __init__(
        self,
        source: Source,
        *,
        dtype: WrittenDtype = "bfloat16",
        fp8: bool = False,
        workers: int = 1,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.architecture: Architecture = source.architecture
        self._dtype: WrittenDtype = dtype
        self._block: Block | None = RELEASED_BLOCK if fp8 else source.fp8_block if dtype == "keep" else None
        self._fp8 = fp8
        expected = expected_tensors(self.architecture)
        self._expected = {name: expected[name] for name in source.names()}
        self._stored_as = {name: self._storage(name, source) for name in self._expected}
        sizes = {
            name: sum(tensor_bytes(dtype, shape) for _, dtype, shape in self._entries_of(name))
            for name in self._expected
        }
        granularity = Granularity.of(sizes, workers)
        self.workers = granularity.workers
        self.shards = list(self._plan_shards(sizes, max_shard_bytes))
        self._shard_of = {entry: shard for shard in self.shards for entry in shard.entries}
        self.units = group(
            self._pieces(sizes, source, granularity.piece_bytes),
            granularity.unit_bytes,
            apart=lambda before, after: self._shard_of[before.name] is not self._shard_of[after.name],
        )
        self.kind = {"format": "released", "dtype": dtype, "fp8": fp8, "shards": [s.nbytes for s in self.shards]}

    # ------------------------------------------------------------------ plan
    def _storage(self, name: str, source: Source) -> str:
        spec = self._expected[name]
        if spec.dtype == "F32":
            return "F32"
        if self._fp8 and spec.fp8:
            return "F8_E4M3"
        if self._dtype == "keep":
            return source.spec(name).dtype
        return STORED_DTYPES[getattr(torch, self._dtype)]

    def _entries_of(self, name: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """Stored tensors of a released one: itself, and its scale where it is FP8."""
        spec, dtype = self._expected[name], self._stored_as[name]
        entries = [(name, dtype, spec.shape)]
        if dtype == "F8_E4M3":
            entries.append((name + SCALE_SUFFIX, "F32", scale_shape(spec.shape, self._block)))
        return entries

    def _plan_shards(self, sizes: Mapping[str, int], limit: int) -> Iterator[_Shard]:
        members: list[list[str]] = [[]]
        filled = 0
        for name, nbytes in sizes.items():
            if members[-1] and filled + nbytes > limit:
                members.append([])
                filled = 0
            members[-1].append(name)
            filled += nbytes
        for number, names in enumerate(members, 1):
            header, entries = encode_header(entry for name in names for entry in self._entries_of(name))
            end = max((entry.start + entry.nbytes for entry in entries), default=len(header))
            yield _Shard(shard_name(number, len(members)), header, {entry.name: entry for entry in entries}, end)

    def _pieces(self, sizes: Mapping[str, int], source: Source, limit: int) -> Iterator[Piece]:
        for name, spec in self._expected.items():
            # a block of FP8 is not divided, neither where it is read nor where it is written
            heights = [block[0] for block in (self._block, source.fp8_block) if block is not None and spec.fp8]
            yield from split_rows(name, spec.shape, sizes[name], limit, multiple=max(heights, default=1))

    # ------------------------------------------------------------------ writing
    def prepare(self, directory: Path) -> None:
        for shard in self.shards:
            # not truncated: an interrupted job may have written to it
            descriptor = os.open(directory / shard.name, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.ftruncate(descriptor, shard.nbytes)
                os.pwrite(descriptor, shard.header, 0)
            finally:
                os.close(descriptor)

    def write(self, unit: Unit, source: Source, directory: Path, advance: Advance) -> None:
        shard = self._shard_of[unit.pieces[0].name]
        memory = aligned_memory(max(stream_bytes("F32", piece.shape) for piece in unit.pieces))
        with contextlib.closing(WriteFile(directory / shard.name)) as file:
            for piece in unit.pieces:
                for entry, row, tensor in self._encode(piece, source, memory):
                    place = shard.entries[entry]
                    file.seek(place.start + tensor_bytes(place.dtype, (row, *place.shape[1:])))
                    file.write_tensor(tensor)
                advance(piece.nbytes)

    def _encode(self, piece: Piece, source: Source, memory: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Stored name, first row and values of what a piece becomes."""
        name, rows = piece.name, slice(*piece.rows)
        dtype = self._stored_as[name]
        if dtype != "F8_E4M3":
            yield name, rows.start, source.tensor(name, rows, into=memory).to(TORCH_DTYPES[dtype])
            return
        if source.spec(name).dtype == "F8_E4M3" and source.fp8_block == self._block:
            weight, scale = source.quantised(name, rows, into=memory)
        else:
            weight, scale = quantize_block(source.tensor(name, rows, into=memory), self._block)
        yield name, rows.start, weight
        yield name + SCALE_SUFFIX, rows.start // self._block[0], scale

    def finish(self, directory: Path, source: Source, records: list[Any]) -> None:
        copy_companions(source.companions, directory)
        weight_map = {entry: shard.name for shard in self.shards for entry in shard.entries}
        total = sum(entry.nbytes for shard in self.shards for entry in shard.entries.values())
        write_json(directory / INDEX_NAME, index_content(weight_map, total))
        mtp = any(spec.group == "mtp" for spec in self._expected.values())
        config = written_config(self.architecture, dtype=self._dtype, mtp=mtp, quantization=self._quantization())
        write_json(directory / "config.json", config)

    def _quantization(self) -> dict[str, Any] | None:
        if "F8_E4M3" not in self._stored_as.values():
            return None
        kept: dict[str, TensorSpec] = {
            name: dataclasses.replace(spec, fp8=self._stored_as[name] == "F8_E4M3")
            for name, spec in self._expected.items()
        }
        return quantization_config(kept, self._block)

    # ------------------------------------------------------------------ verifying
    def verify(self, directory: Path, source: Source, progress: Advance) -> None:
        written = CheckpointReader(directory)
        written.check()
        block = self._block if self._fp8 else None
        found = compare(source, written, requantised=block, workers=self.workers, progress=progress)
        found.require_equal(directory)
