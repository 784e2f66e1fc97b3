"""Output directories that appear when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from glm5next_plugin.errors import InputError


@contextlib.contextmanager
def staged_directory(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A new directory beside ``target`` to write into; it takes the name of ``target`` when the block ends.

    If the block raises or is interrupted it is removed and ``target`` stays as it was. A process that is killed leaves
    a hidden ``.NAME.partial-*`` beside ``target``.

    Args:
        target: directory to make; its parents are made as well.
        overwrite: replace a directory that is not empty, once the new one is complete.

    Raises:
        InputError: ``target`` is a file, or not empty without ``overwrite``.
    """
    target = Path(target)
    refuse_occupied(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        yield staging
        refuse_occupied(target, overwrite=overwrite)
        replace_directory(target, staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def refuse_occupied(target: str | Path, *, overwrite: bool) -> None:
    """Raise InputError if :func:`staged_directory` could not make ``target``."""
    target = Path(target)
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file; give a directory that does not exist yet")
    if target.is_dir() and not overwrite and any(target.iterdir()):
        raise InputError(f"{target} exists and is not empty; give another directory or ask to overwrite it")


def replace_directory(target: Path, staging: Path) -> None:
    """Give ``staging`` the name of ``target``; a directory of that name goes when the new one has it."""
    if target.is_dir() and any(target.iterdir()):
        replaced = target.parent / f".{target.name}.replaced-{secrets.token_hex(4)}"
        target.rename(replaced)
        try:
            staging.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        shutil.rmtree(replaced)
    else:
        staging.rename(target)
