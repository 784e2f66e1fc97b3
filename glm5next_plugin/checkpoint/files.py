"""Bytes between files and memory past the page cache, where the file system can do that.

A conversion reads and writes each byte once; in the page cache they would only push out what others need, and a copy of
them is what a fast disk waits for. Direct reads and writes have to be whole blocks from memory at a block's boundary.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch

BLOCK = 4096
_BUFFER_BYTES = 16 * 1024**2


def aligned_memory(nbytes: int) -> torch.Tensor:
    """1-D uint8 memory at a block's boundary, with room for ``nbytes`` at any place within a block."""
    return torch.frombuffer(mmap.mmap(-1, _up(nbytes) + 2 * BLOCK), dtype=torch.uint8)


class ReadFile:
    """A file to read from at any place.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path):
        self._plain = os.open(path, os.O_RDONLY)
        self._direct = _open_direct(path, os.O_RDONLY)

    def read(self, start: int, nbytes: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Bytes from ``start`` on, as 1-D uint8.

        Args:
            start: of the first byte.
            nbytes: how many.
            into: memory of :func:`aligned_memory` to read into; new memory if left out.

        Raises:
            EOFError: the file ends before.
            OSError: it cannot be read.
            ValueError: ``into`` does not start at a block's boundary.
        """
        if into is None:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            _fill(self._plain, memory, start, nbytes)
            return memory
        if into.data_ptr() % BLOCK:
            raise ValueError("into: needed: memory of aligned_memory(), from its start")
        before = start % BLOCK
        descriptor = self._plain if self._direct is None else self._direct
        _fill(descriptor, into[: _up(before + nbytes)], start - before, before + nbytes)
        return into[before : before + nbytes]

    def close(self) -> None:
        """Close it; it cannot be read from any more."""
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)


def _fill(descriptor: int, memory: torch.Tensor, start: int, needed: int) -> None:
    """Read into all of ``memory``, of which the last block may lie beyond the end of the file."""
    view = memoryview(memory.numpy())
    done = 0
    while done < needed:
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise EOFError(f"the file ends {needed - done} bytes too early")
        done += count


class WriteFile:
    """A file to write runs of bytes to; also what ``torch.save`` takes.

    Where a run starts or ends within a block, that block is written through the page cache, so that several processes
    can write neighbouring runs of one file.

    Args:
        path: a file that exists.
        start: where the first run starts.

    Raises:
        OSError: here and from each method, the file cannot be written.
    """

    def __init__(self, path: Path, start: int = 0):
        self._plain = os.open(path, os.O_WRONLY)
        self._direct = _open_direct(path, os.O_WRONLY)
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._place = start  # of the first byte that is not written yet
        self._first = self._next = start % BLOCK  # in the buffer: of that byte, and of the next that comes

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._place + self._next - self._first

    def seek(self, place: int) -> None:
        """Start a new run there, unless the present one has just got there."""
        if place != self.tell():
            self.flush()
            self._place, self._first, self._next = place, place % BLOCK, place % BLOCK

    def write(self, data: Any) -> int:
        """Add bytes to the run."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = min(len(view) - done, _BUFFER_BYTES - self._next)
            self._buffer[self._next : self._next + count] = view[done : done + count]
            self._next += count
            done += count
            if self._next == _BUFFER_BYTES:
                self._empty()
        return done

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Add the bytes of a contiguous tensor to the run."""
        self.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))

    def flush(self) -> None:
        """Hand all bytes to the system."""
        self._empty()

    def close(self) -> None:
        """Make all bytes durable and close the file; after a failure, only close it."""
        try:
            self._empty()
            os.fsync(self._plain)
        finally:
            os.close(self._plain)
            if self._direct is not None:
                os.close(self._direct)

    def _empty(self) -> None:
        """Write the buffer: whole blocks directly, the rest through the page cache."""
        first, last = self._first, self._next
        middle, end = _up(first), last // BLOCK * BLOCK
        if self._direct is None or middle >= end:
            self._put(self._plain, first, last)
        else:
            self._put(self._plain, first, middle)
            self._put(self._direct, middle, end)
            self._put(self._plain, end, last)
        self._place += last - first
        self._first = self._next = self._place % BLOCK

    def _put(self, descriptor: int, first: int, last: int) -> None:
        while first < last:
            place = self._place + first - self._first
            first += os.pwrite(descriptor, self._buffer[first:last], place)


def _open_direct(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return None  # a file system without direct access; the file itself was opened before


def _up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    _sync(directory)


def sync_files(directory: Path) -> None:
    """Make a directory, all that is below it and its content durable."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
