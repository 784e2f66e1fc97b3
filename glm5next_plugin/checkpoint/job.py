"""Long writes: units by worker processes into a directory beside the target, which takes its name when all is there.

While a job runs, ``.NAME.partial`` beside the target holds ``.job`` (what is converted, from which state of the source)
and ``.done`` (a line a unit, written after the unit's bytes are on the disk). That is all that a later run needs to
go on. They go when the directory has the target's name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from glm5next_plugin import __version__
from glm5next_plugin.errors import InputError
from glm5next_plugin.json_text import read_json

from .files import sync_directory, sync_files
from .pieces import Unit
from .sources import Source
from .staging import refuse_occupied, replace_directory
from .workers import Advance, WorkerDied, run_tasks

JOB = ".job"
DONE = ".done"
LOCK = ".lock"
_LOCK_SECONDS = 10.0

# called with a stage ("converting"), the bytes done of it and the bytes of the whole
Progress = Callable[[str, int, int], None]


class Target(Protocol):
    """What a job writes. It can be pickled.

    Attributes:
        units: all there is to write.
        workers: processes that are worth starting.
        kind: says in the job file what is written, with all that changes its bytes.
    """

    units: tuple[Unit, ...]
    workers: int
    kind: dict[str, Any]

    def prepare(self, directory: Path) -> None:
        """Make what units are written into; also called on a directory that an interrupted job left."""

    def write(self, unit: Unit, source: Source, directory: Path, advance: Advance) -> Any:
        """Write a unit so that it is on the disk; what :meth:`finish` needs to know of it, as JSON."""

    def finish(self, directory: Path, source: Source, records: list[Any]) -> None:
        """Write what makes a checkpoint of the units; ``records`` are those of all units in order."""

    def verify(self, directory: Path, source: Source, progress: Advance) -> None:
        """Read what was written and compare it with the source; raises InputError."""


def partial_directory(path: str | Path) -> Path:
    """Where a job for ``path`` works."""
    path = Path(path)
    return path.parent / f".{path.name}.partial"


def run_job(
    source: Source,
    target: Target,
    path: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> None:
    """Write ``target`` from ``source`` as the directory ``path``, which appears when it is complete.

    Args:
        source: checked already.
        target: what to write.
        path: directory to make.
        overwrite: replace a directory that is not empty, and discard what an interrupted job left.
        resume: go on with what an interrupted job left; without one, start.
        verify: compare what was written with the source before it takes its name.
        progress: called as the job gets on.

    Raises:
        InputError: an occupied ``path``, what another job left there, too little room, a fault of the source. After a
            fault of the source nothing is left; after a full disk or an interruption a later job can resume.
    """
    path = Path(path)
    refuse_occupied(path, overwrite=overwrite)
    directory = partial_directory(path)
    identity = {"version": __version__, "target": target.kind, "source": source.identity(), "units": len(target.units)}
    total = sum(unit.nbytes for unit in target.units)
    if not directory.exists():
        _require_room(path.parent, total)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _claim(directory, path, identity, resume=resume, overwrite=overwrite) as (lock, records):
        done = sum(unit.nbytes for unit in target.units if unit.number in records)
        _require_room(path.parent, total - done)
        try:
            target.prepare(directory)
            todo = [unit for unit in target.units if unit.number not in records]
            progress("writing", done, total)

            def advance(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                progress("writing", done, total)

            with (directory / DONE).open("a") as journal:
                results = run_tasks(
                    _make_writer, (target, source, directory), todo, workers=target.workers, progress=advance, held=lock
                )
                with contextlib.closing(results):
                    for unit, record in results:
                        records[unit.number] = record
                        journal.write(json.dumps([unit.number, record]) + "\n")
                        journal.flush()
                        os.fsync(journal.fileno())
            progress("writing", total, total)
            target.finish(directory, source, [records[unit.number] for unit in target.units])
            if verify:
                checked = 0
                progress("verifying", 0, total)

                def advance_check(nbytes: int) -> None:
                    nonlocal checked
                    checked += nbytes
                    progress("verifying", checked, total)

                target.verify(directory, source, advance_check)
        except InputError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        except WorkerDied as error:
            raise InputError(f"{path}: {error} (out of memory?); go on with --resume, with fewer --workers") from error
        except OSError as error:
            raise InputError(_write_failure(path, error)) from error
        sync_files(directory)
        refuse_occupied(path, overwrite=overwrite)
        replace_directory(path, directory)
        for name in (DONE, JOB, LOCK):  # only now: killed before, all would be done again
            (path / name).unlink(missing_ok=True)
        sync_directory(path.parent)


class _make_writer:
    """The handler of a worker: writes units."""

    def __init__(self, target: Target, source: Source, directory: Path, advance: Advance):
        self._arguments = (source, directory, advance)
        self._target = target

    def __call__(self, unit: Unit) -> Any:
        return self._target.write(unit, *self._arguments)


@contextlib.contextmanager
def _claim(
    directory: Path, path: Path, identity: dict[str, Any], *, resume: bool, overwrite: bool
) -> Iterator[tuple[int, dict[int, Any]]]:
    """The lock of the working directory, and the records of the units that are there already."""
    found = directory.is_dir()
    if found and not resume and not overwrite:
        raise InputError(
            f"{directory} is there: an interrupted job for {path}; go on with --resume, or start anew with --overwrite"
        )
    directory.mkdir(exist_ok=True)
    lock = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _take(lock, directory)
        records: dict[int, Any] = {}
        if found and resume and (directory / JOB).is_file():
            _require_same(directory / JOB, identity, path)
            records = _read_records(directory / DONE)
        else:
            for entry in directory.iterdir():
                if entry.name != LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            _write_whole(directory / JOB, json.dumps(identity))
        yield lock, records
    finally:
        os.close(lock)


def _take(lock: int, directory: Path) -> None:
    # workers of a job that was killed hold it until they are gone, which is a moment later
    patience = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > patience:
                raise InputError(f"{directory} is being written by another process") from None
            time.sleep(0.1)


def _require_same(file: Path, identity: dict[str, Any], path: Path) -> None:
    try:
        found = read_json(file)
    except ValueError as error:
        raise InputError(f"{file} cannot be read ({error}); start anew with --overwrite") from error
    identity = json.loads(json.dumps(identity))
    if found != identity:
        differ = [key for key in identity if not isinstance(found, dict) or found.get(key) != identity[key]]
        raise InputError(
            f"{file.parent} was left by another job for {path} ({' and '.join(differ)} differ); repeat the command "
            "that was interrupted, or start anew with --overwrite"
        )


def _read_records(file: Path) -> dict[int, Any]:
    records = {}
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):  # the last line may be cut short
            number, record = json.loads(line)
            records[number] = record
    return records


def _write_whole(file: Path, content: str) -> None:
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)


def _require_room(directory: Path, needed: int) -> None:
    there = next(folder for folder in (directory.resolve(), *directory.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InputError(f"{directory}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free")


def _write_failure(path: Path, error: OSError) -> str:
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{path} cannot be written{where}: {error.strerror}; make room and go on with --resume"
    return f"{path} cannot be written{where}: {error}; go on with --resume"
