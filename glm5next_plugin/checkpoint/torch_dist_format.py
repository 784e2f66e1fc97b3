"""The files of a torch_dist checkpoint, as ``torch.distributed.checkpoint`` and megatron-core lay them out.

A directory holds ``.metadata`` (a pickle that says which chunk of which tensor lies where), ``metadata.json`` (the name
of the format) and ``*.distcp`` files, which are ``torch.save`` streams one after another: a tensor each, or a list with
one object.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.errors import InputError
from glm5next_plugin.json_text import read_json

from .dtypes import STORED_DTYPES
from .files import BLOCK, ReadFile
from .header import tensor_bytes
from .torch_dist_metadata import Record, read_metadata
from .weight_map import is_file_name, is_tensor_name

METADATA = ".metadata"
FORMAT = "metadata.json"
_FORMAT_CONTENT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}

_FRAME_BYTES = 64 * 1024
_MAX_DIMENSIONS = 64  # as torch has it

Numbers = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it is stored.

    Attributes:
        offset, shape: first index and size of the box in each dimension.
        file: name of the file in the checkpoint directory.
        start, nbytes: the stream in that file.
    """

    offset: Numbers
    shape: Numbers
    file: str
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class DistributedTensor:
    """A tensor of a checkpoint: its whole shape, its dtype and its chunks by offset."""

    shape: Numbers
    dtype: torch.dtype
    chunks: Mapping[Numbers, Chunk]


class DistributedTensors:
    """The tensors of a directory by key, in any division into chunks.

    Attributes:
        directory: the checkpoint.
        tensors: key -> :class:`DistributedTensor`.

    Raises:
        InputError: no such checkpoint, or metadata that cannot be read.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[str, ReadFile] = {}
        # a box is often a part of a large chunk, and the next one another part of it
        self._last: tuple[tuple[str, Numbers], torch.Tensor] | None = None
        for needed in (FORMAT, METADATA):
            if not (self.directory / needed).is_file():
                raise InputError(f"{self.directory} is no distributed checkpoint: it has no {needed}")
        try:
            backend = read_json(self.directory / FORMAT)["sharded_backend"]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.directory / FORMAT} names no sharded_backend ({error})") from error
        if backend != _FORMAT_CONTENT["sharded_backend"]:
            raise InputError(f"{self.directory / FORMAT} says {backend!r:.200}; needed: 'torch_dist'")
        try:
            metadata = read_metadata(self.directory / METADATA)
            self.tensors = dict(_tensors(metadata))
        except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"{self.directory / METADATA} is no metadata of torch_dist ({error!s:.500})") from error

    def files(self) -> set[str]:
        """Names of the files that hold tensors."""
        return {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks.values()}

    def faults(self, keys: Iterable[str]) -> list[str]:
        """Chunks of these tensors that overlap or leave a gap, and files that are missing or cut short."""
        faults, ends = [], {}
        for key in keys:
            tensor = self.tensors[key]
            covered = sum(math.prod(chunk.shape) for chunk in tensor.chunks.values())
            overlap = _overlap(tensor.chunks.values())
            if overlap is not None:
                faults.append(f"{key}: its chunks at {list(overlap[0].offset)} and {list(overlap[1].offset)} overlap")
            elif covered != math.prod(tensor.shape):
                faults.append(f"{key}: its chunks hold {covered} of {math.prod(tensor.shape)} values")
            for chunk in tensor.chunks.values():
                if chunk.start + chunk.nbytes > ends.get(chunk.file, (0, ""))[0]:
                    ends[chunk.file] = (chunk.start + chunk.nbytes, key)
        for file, (end, key) in sorted(ends.items()):
            path = self.directory / file
            if not path.is_file():
                faults.append(f"{file} is missing; it holds {key}")
            elif path.stat().st_size < end:
                faults.append(f"{file} is cut short: {path.stat().st_size} bytes; {key} ends at {end}")
        return faults

    def read(self, key: str, offset: Numbers, shape: Numbers, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """A box of a tensor, put together from the chunks that it overlaps.

        Args:
            key: of the tensor.
            offset, shape: of the box.
            into: :func:`.files.aligned_memory` to read a chunk into that is the whole box, with room for its stream.

        Raises:
            InputError: a chunk cannot be read, or is not what the metadata tells.
        """
        tensor = self.tensors[key]
        exact = tensor.chunks.get(offset)
        if exact is not None and exact.shape == shape:
            return self._chunk(key, exact, tensor.dtype, into)
        box = torch.empty(shape, dtype=tensor.dtype)  # filled, since faults() found no gap between the chunks
        for chunk in tensor.chunks.values():
            low = [max(a, b) for a, b in zip(offset, chunk.offset, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(offset, shape, chunk.offset, chunk.shape, strict=True)]
            if all(first < last for first, last in zip(low, high, strict=True)):
                inside = [slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offset, strict=True)]
                place = [slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True)]
                box[tuple(place)] = self._kept_chunk(key, chunk, tensor.dtype)[tuple(inside)]
        return box

    def files_of(self, key: str, offset: Numbers, shape: Numbers) -> list[str]:
        """Names of the files that hold a box of a tensor."""
        box = Chunk(offset, shape, "", 0, 0)
        return sorted({chunk.file for chunk in self.tensors[key].chunks.values() if _overlap((box, chunk))})

    def _kept_chunk(self, key: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        if self._last is None or self._last[0] != (key, chunk.offset):
            self._last = None  # not two of them in memory
            self._last = ((key, chunk.offset), self._chunk(key, chunk, dtype, None))
        return self._last[1]

    def _chunk(self, key: str, chunk: Chunk, dtype: torch.dtype, into: torch.Tensor | None) -> torch.Tensor:
        where = f"{self.directory / chunk.file}: {key} at {list(chunk.offset)}"
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = ReadFile(self.directory / chunk.file)
            room = into is not None and chunk.nbytes <= len(into) - 2 * BLOCK
            stream = self._files[chunk.file].read(chunk.start, chunk.nbytes, into if room else None)
        except (OSError, EOFError) as error:
            raise InputError(f"{where} cannot be read: {error}") from error
        try:
            tensor = _loaded(stream, dtype, chunk.shape)
        except Exception as error:  # zipfile and torch.load raise what a damaged archive happens to run into
            raise InputError(f"{where} is no tensor that torch.save wrote ({type(error).__name__})") from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.shape or tensor.dtype != dtype:
            raise InputError(f"{where} is not the {dtype} tensor of shape {list(chunk.shape)} that {METADATA} tells of")
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}, "_last": None}


def stream_bytes(dtype: str, shape: Numbers) -> int:
    """Bytes that the stream of a tensor takes at most: its own, and the frame around them."""
    return tensor_bytes(dtype, shape) + _FRAME_BYTES


def _loaded(stream: torch.Tensor, dtype: torch.dtype, shape: Numbers) -> Any:
    """What ``torch.save`` wrote; a contiguous tensor, as is the rule, comes as a view of the stream."""
    view = memoryview(stream.numpy())
    with zipfile.ZipFile(_Memory(view)) as archive:
        files = {file.filename.partition("/")[2]: file for file in archive.infolist()}
        data = files.get("data/0")
        nbytes = math.prod(shape) * dtype.itemsize
        described = files["data.pkl"]
        plain = described.compress_type == zipfile.ZIP_STORED and described.file_size <= _FRAME_BYTES
        if data is not None and plain and archive.read(described) == _contiguous(dtype, shape):
            if data.compress_type == zipfile.ZIP_STORED and data.file_size == nbytes:
                first = data.header_offset + _LOCAL_HEADER.size
                first += sum(_LOCAL_HEADER.unpack_from(view, data.header_offset))
                values = stream[first : first + nbytes]
                if values.storage_offset() % dtype.itemsize:
                    values = values.clone()
                return values.view(dtype).view(shape)
    return torch.load(_Memory(view), map_location="cpu", weights_only=True)


# of the header before each file of a zip archive: lengths of the name and of the extra field that follow it
_LOCAL_HEADER = struct.Struct("<26xHH")


@functools.lru_cache(maxsize=256)
def _contiguous(dtype: torch.dtype, shape: Numbers) -> bytes:
    """What ``torch.save`` says of a contiguous tensor beside its values."""
    start = _Start()
    torch.save(torch.empty(shape, dtype=dtype), start)
    first = _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack_from(start.kept))
    return bytes(start.kept[first : start.kept.index(b"PK", first)])


class _Start:
    """Keeps the first bytes that are written to it."""

    def __init__(self):
        self.kept = bytearray()

    def write(self, data: Any) -> int:
        if len(self.kept) < BLOCK:
            self.kept += memoryview(data).cast("B")[:BLOCK]
        return len(data)

    def flush(self) -> None:
        pass


class _Memory(io.RawIOBase):
    """Memory as a file to read; it is not copied."""

    def __init__(self, view: memoryview):
        self._view, self._place = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._view)}[whence]
        if place < 0:
            raise ValueError(f"no place {place}")
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        data = self._view[self._place : self._place + len(target)]
        target[: len(data)] = data
        self._place += len(data)
        return len(data)


def _tensors(metadata: Record) -> Iterable[tuple[str, DistributedTensor]]:
    """Tensors by key; raises ValueError, or what a record of another form raises where it is used."""
    stored = {
        (index.fqn, _numbers(index.offset)): info
        for index, info in metadata.storage_data.items()
        if getattr(index, "offset", None) is not None
    }
    for key, described in metadata.state_dict_metadata.items():
        if described.kind != "TensorStorageMetadata":
            continue
        if not is_tensor_name(key):
            raise ValueError(f"{key!a:.200} can be no tensor's key")
        shape, dtype = _numbers(described.size), described.properties.dtype
        if dtype not in STORED_DTYPES:
            raise ValueError(f"{key} has dtype {dtype!r:.200}")
        chunks = {}
        for box in described.chunks:
            offset, sizes = _numbers(box.offsets), _numbers(box.sizes)
            if not len(offset) == len(sizes) == len(shape) or any(
                start + size > whole for start, size, whole in zip(offset, sizes, shape, strict=True)
            ):
                raise ValueError(f"{key} of shape {list(shape)} has a chunk of {list(sizes)} at {list(offset)}")
            info = stored[key, offset]
            start, nbytes = _numbers((info.offset, info.length))
            if not is_file_name(info.relative_path):
                raise ValueError(f"{key} is said to lie in {info.relative_path!a:.200}, which is no file beside it")
            chunks[offset] = Chunk(offset, sizes, info.relative_path, start, nbytes)
        yield key, DistributedTensor(shape, dtype, chunks)


def _numbers(values: Any) -> Numbers:
    """Sizes, offsets or places; ValueError if they can be none."""
    numbers = tuple(values)
    if len(numbers) > _MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError("a size or a place is no number, or beyond 64 bits")
    return numbers


def _overlap(chunks: Iterable[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks with an index in common, if there are any."""
    within: list[Chunk] = []  # those that go on where the present one starts, in the first dimension
    for chunk in sorted((chunk for chunk in chunks if chunk.offset), key=lambda chunk: chunk.offset):
        within = [other for other in within if other.offset[0] + other.shape[0] > chunk.offset[0]]
        for other in within:
            both = zip(chunk.offset, chunk.shape, other.offset, other.shape, strict=True)
            if all(max(a, b) < min(a + m, b + n) for a, m, b, n in both):
                return other, chunk
        within.append(chunk)
    return None


# ---------------------------------------------------------------------- writing
@dataclasses.dataclass(frozen=True)
class WrittenTensor:
    """A tensor of which all chunks are written: whole shape, dtype, and its chunks in order."""

    shape: Numbers
    dtype: torch.dtype
    chunks: Sequence[Chunk]


def write_metadata(
    directory: Path, tensors: Mapping[str, WrittenTensor], objects: Mapping[str, tuple[str, int, int]]
) -> None:
    """Write ``.metadata`` and ``metadata.json``, which make a checkpoint of the files that are there.

    Args:
        directory: where the ``*.distcp`` files are.
        tensors: key -> tensor.
        objects: key -> file, start and bytes of the list that holds the object.
    """
    # imported here, since that takes seconds and reading does without
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results: list[WriteResult] = []
    for key, tensor in tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks]
        properties = TensorProperties(dtype=tensor.dtype)
        described[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        results += [
            WriteResult(
                MetadataIndex(key, torch.Size(chunk.offset), number),
                chunk.nbytes,
                _StorageInfo(chunk.file, chunk.start, chunk.nbytes),
            )
            for number, chunk in enumerate(tensor.chunks)
        ]
    for key, (file, start, nbytes) in objects.items():
        described[key] = BytesStorageMetadata()
        results.append(WriteResult(MetadataIndex(key), nbytes, _StorageInfo(file, start, nbytes)))

    class Writer(FileSystemWriter):
        def storage_meta(self) -> None:
            """Neither the directory nor a random number: what is equal is equal by the byte."""

    writer = Writer(directory)
    writer.finish(Metadata(state_dict_metadata=described), [results])
    (directory / FORMAT).write_text(json.dumps(_FORMAT_CONTENT))
