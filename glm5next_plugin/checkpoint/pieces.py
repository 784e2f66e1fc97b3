"""A checkpoint in pieces that one process can hold, and units that are written, or done again, as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from .inventory import split_layer

_MAX_PIECE_BYTES = 64 * 1024**2
_MAX_UNIT_BYTES = 1024**3
_MAX_WORKERS = 8
_BYTES_WORTH_A_WORKER = 64 * 1024**2  # below, a process costs more time to start than it saves


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of one released tensor.

    Attributes:
        name: released name.
        rows: run of its first dimension.
        shape: of the piece.
        nbytes: of the piece as it is written.
    """

    name: str
    rows: tuple[int, int]
    shape: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Unit:
    """Pieces that one worker writes one after another into one file, and their bytes."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Granularity:
    """How much is written at once.

    Attributes:
        workers: processes that are worth starting.
        piece_bytes: a tensor is read and written in runs of rows up to this size.
        unit_bytes: a unit is closed before it would grow beyond this. All workers' units together are no more than the
            largest layer, which bounds what an interruption costs.
    """

    workers: int
    piece_bytes: int
    unit_bytes: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], workers: int) -> Granularity:
        """For a checkpoint of tensors with these bytes and at most this many workers."""
        layers: dict[int | str, int] = {}
        for name, nbytes in sizes.items():
            number = split_layer(name)[0]
            layer = name if number is None else number
            layers[layer] = layers.get(layer, 0) + nbytes
        worth = -(-sum(layers.values()) // _BYTES_WORTH_A_WORKER)
        workers = max(1, min(workers, _MAX_WORKERS, worth))
        unit = max(1, min(_MAX_UNIT_BYTES, max(layers.values(), default=1) // workers))
        return cls(workers, min(_MAX_PIECE_BYTES, unit), unit)


def split_rows(name: str, shape: tuple[int, ...], nbytes: int, limit: int, *, multiple: int = 1) -> Iterator[Piece]:
    """A tensor as pieces of at most ``limit`` bytes, or of ``multiple`` rows where those are more."""
    rows = shape[0]
    of_piece = max(multiple, limit * rows // max(nbytes, 1) // multiple * multiple)
    written = 0
    for start in range(0, rows, of_piece):
        stop = min(start + of_piece, rows)
        upto = nbytes * stop // rows
        yield Piece(name, (start, stop), (stop - start, *shape[1:]), upto - written)
        written = upto


def group(
    pieces: Iterable[Piece], limit: int, *, apart: Callable[[Piece, Piece], bool] = lambda before, after: False
) -> tuple[Unit, ...]:
    """Pieces in their order as units of at most ``limit`` bytes, or of one piece where that is more.

    Args:
        pieces: to group.
        limit: bytes of a unit.
        apart: whether a unit must end between two pieces.
    """
    units: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not units or size + piece.nbytes > limit or apart(units[-1][-1], piece):
            units.append([])
            size = 0
        units[-1].append(piece)
        size += piece.nbytes
    return tuple(Unit(number, tuple(members)) for number, members in enumerate(units))
