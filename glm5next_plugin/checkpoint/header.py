"""Headers of safetensors files: 8 bytes little-endian length, JSON, then the tensors' bytes without a hole.

Read here and not through the library, because its errors name neither file nor tensor and it does not see a name that
stands twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glm5next_plugin.json_text import Pairs, parse_json

from .weight_map import is_tensor_name

_MAX_HEADER = 100_000_000  # bytes; the library's own limit
_MAX_DIMENSIONS = 64  # as torch has it
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


class HeaderError(ValueError):
    """A file that is no complete safetensors file."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a header: name as stored, dtype as spelled there, shape, and where its bytes start in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_bytes(self.dtype, self.shape)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a dtype in the spelling of headers."""
    return math.prod(shape) * _BITS[dtype] // 8


def read_header(file: Path) -> list[Entry]:
    """Tensors of a file, in the order of the header; a name that stands twice comes twice.

    Raises:
        HeaderError: the file is cut short, too long, or no safetensors file.
        OSError: the file cannot be read.
    """
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise HeaderError("no safetensors file: not even a file")
    with file.open("rb") as stream:
        length = int.from_bytes(start := stream.read(8), "little")
        if len(start) < 8:
            raise HeaderError("no safetensors file: shorter than 8 bytes")
        if length > _MAX_HEADER:
            raise HeaderError(f"no safetensors file: its header would be {length} bytes long")
        raw = stream.read(length)
        size = stream.seek(0, 2)
    if len(raw) < length:
        raise HeaderError(f"cut short: {size} bytes, the header alone needs {8 + length}")
    try:
        pairs = parse_json(raw, pairs=True)
        if not isinstance(pairs, Pairs):
            raise ValueError(f"it is a {type(pairs).__name__}")
    except ValueError as error:
        raise HeaderError(f"no safetensors file: its header is no JSON object of tensors ({error})") from error
    entries = [_entry(name, value, 8 + length) for name, value in pairs if name != "__metadata__"]
    end = 0
    for (start, stop), entry in sorted(entries, key=lambda item: item[0]):
        if start != end or stop - start != entry.nbytes:
            described = f"{entry.name} ({entry.dtype} {list(entry.shape)}, {entry.nbytes} bytes)"
            raise HeaderError(
                f"tensor {described} is said to lie at bytes {start} to {stop}; expected {end} to {end + entry.nbytes}"
            )
        end = stop
    if size != 8 + length + end:
        state = "cut short" if size < 8 + length + end else "too long"
        raise HeaderError(f"{state}: {size} bytes, its header tells of {8 + length + end}")
    return [entry for _, entry in entries]


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """The first bytes of a file with these tensors (name, dtype, shape), and where each of them will lie."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends, end = [], 0
    for name, dtype, shape in tensors:
        start, end = end, end + tensor_bytes(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        ends.append((name, dtype, shape, start))
    raw = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # the format asks for tensors at multiples of 8
    first = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, [Entry(*fields, first + start) for *fields, start in ends]


def _entry(name: str, value: Any, first: int) -> tuple[tuple[int, int], Entry]:
    if not is_tensor_name(name):
        raise HeaderError(f"no safetensors file: {name!a:.200} can be no tensor's name")
    if not isinstance(value, Pairs):
        raise HeaderError(f"tensor {name} is described by {value!r:.200}")
    described = dict(value)
    dtype, shape, offsets = described.get("dtype"), described.get("shape"), described.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise HeaderError(f"tensor {name} has dtype {dtype!r:.200}, which is not known")
    for field, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise HeaderError(f"tensor {name} has {field} {numbers!r:.200}")
    if len(shape) > _MAX_DIMENSIONS:
        raise HeaderError(f"tensor {name} has {len(shape)} dimensions")
    if len(offsets) != 2:
        raise HeaderError(f"tensor {name} has data_offsets {offsets!r}")
    return (offsets[0], offsets[1]), Entry(name, dtype, tuple(shape), first + offsets[0])
