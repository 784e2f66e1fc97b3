"""Whether two checkpoints hold the same weights, tensor by tensor, whatever their spelling, format and dtype.

Two tensors are equal if their bits are, after an FP8 weight is dequantised to bfloat16. Of a bfloat16 and an fp32
tensor the fp32 one is rounded first, and that is counted apart; the five fp32 kinds are never rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from .faults import raise_faults
from .files import aligned_memory
from .fp8 import Block, dequantize_block, quantize_block
from .header import tensor_bytes
from .pieces import Granularity, Piece, Unit, group, split_rows
from .sources import Source
from .torch_dist_format import stream_bytes
from .workers import Advance, run_tasks

Verdict = Literal["equal", "rounded", "different"]
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was found; names are released ones.

    Attributes:
        equal: tensors with the same bits.
        rounded: tensors that are the same after the fp32 one was rounded to bfloat16.
        different: name -> how.
        only_first, only_second: tensors that one of them lacks.
    """

    equal: list[str]
    rounded: list[str]
    different: dict[str, str]
    only_first: list[str]
    only_second: list[str]

    @property
    def same(self) -> bool:
        """Whether nothing differs and nothing is missing."""
        return not (self.different or self.only_first or self.only_second)

    def require_equal(self, where: Path) -> None:
        """Raise InputError unless :attr:`same`; ``where`` is the second."""
        faults = [f"{name} differs: {how}" for name, how in self.different.items()]
        faults += [f"{name} is missing" for name in self.only_first]
        faults += [f"{name} should not be there" for name in self.only_second]
        raise_faults(where, faults)


@dataclasses.dataclass(frozen=True)
class _Found:
    """The verdict over rows of a tensor, in a form that adds up over its pieces."""

    verdict: Verdict
    differing: int = 0
    largest: float = 0.0


def compare(
    first: Source,
    second: Source,
    *,
    requantised: Block | None = None,
    workers: int = 1,
    progress: Advance = lambda nbytes: None,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        first: checked already.
        second: checked already.
        requantised: where one side is FP8 and the other is not, quantise that in these blocks first, as an export does;
            left out, it is compared as it is.
        workers: at most this many processes.
        progress: called with the bytes of ``first`` that were compared.

    Raises:
        InputError: a tensor cannot be read, or has values that are not finite.
    """
    ours, theirs = set(first.names()), set(second.names())
    both = [name for name in first.names() if name in theirs]
    different = {}
    for name in both:
        shapes = [list(source.spec(name).shape) for source in (first, second)]
        if shapes[0] != shapes[1]:
            different[name] = f"shape {shapes[0]} and {shapes[1]}"
    sizes = {
        name: tensor_bytes(first.spec(name).dtype, first.spec(name).shape) for name in both if name not in different
    }
    granularity = Granularity.of(sizes, workers)
    blocks = [source.fp8_block[0] for source in (first, second) if source.fp8_block is not None]
    blocks += [requantised[0]] if requantised is not None else []
    pieces = (
        piece
        for name, nbytes in sizes.items()
        for piece in split_rows(
            name, first.spec(name).shape, nbytes, granularity.piece_bytes, multiple=max(blocks, default=1)
        )
    )
    units = group(pieces, granularity.unit_bytes)
    found: dict[str, list[_Found]] = {}
    for unit, verdicts in run_tasks(
        _Comparer, (first, second, requantised), units, workers=granularity.workers, progress=progress
    ):
        for piece, verdict in zip(unit.pieces, verdicts, strict=True):
            found.setdefault(piece.name, []).append(verdict)
    different |= {
        name: _describe(parts) for name, parts in found.items() if any(part.verdict == "different" for part in parts)
    }
    return Comparison(
        equal=[name for name, parts in found.items() if all(part.verdict == "equal" for part in parts)],
        rounded=[
            name
            for name, parts in found.items()
            if name not in different and any(part.verdict == "rounded" for part in parts)
        ],
        different=different,
        only_first=[name for name in first.names() if name not in theirs],
        only_second=[name for name in second.names() if name not in ours],
    )


def _describe(parts: Sequence[_Found]) -> str:
    largest = max(part.largest for part in parts)
    return f"{sum(part.differing for part in parts)} values differ, by up to {largest:.3g}"


class _Comparer:
    """The handler of a worker: verdicts over the pieces of a unit."""

    def __init__(self, first: Source, second: Source, requantised: Block | None, advance: Advance):
        self._sources = (first, second)
        self._requantised = requantised
        self._advance = advance

    def __call__(self, unit: Unit) -> list[_Found]:
        memory = [aligned_memory(max(stream_bytes("F32", piece.shape) for piece in unit.pieces)) for _ in range(2)]
        verdicts = []
        for piece in unit.pieces:
            verdicts.append(self._compare(piece, memory))
            self._advance(piece.nbytes)
        return verdicts

    def _compare(self, piece: Piece, memory: list[torch.Tensor]) -> _Found:
        name, rows = piece.name, slice(*piece.rows)
        tensors = [source.tensor(name, rows, into=own) for source, own in zip(self._sources, memory, strict=True)]
        stored = [source.spec(name).dtype for source in self._sources]
        if self._requantised is not None and stored.count("F8_E4M3") == 1:
            plain = stored.index("F8_E4M3") ^ 1
            weight, scale = quantize_block(tensors[plain], self._requantised)
            tensors[plain] = dequantize_block(weight, scale, self._requantised).to(torch.bfloat16)
        verdict: Verdict = "equal"
        if tensors[0].dtype != tensors[1].dtype:
            tensors = [tensor.to(torch.bfloat16) for tensor in tensors]
            verdict = "rounded"
        a, b = tensors
        unequal = a.view(_BITS[a.dtype]) != b.view(_BITS[b.dtype])
        if not unequal.any():
            return _Found(verdict)
        return _Found("different", int(unequal.sum()), float((a.float() - b.float()).abs().max()))
