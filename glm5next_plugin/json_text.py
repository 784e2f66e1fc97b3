"""JSON that others wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DIGITS = 19  # of the largest number of 64 bits; Python would read, and choke on, thousands


class Pairs(list):
    """A JSON object as its pairs, since a dict would hide a key that stands twice."""


def parse_json(raw: bytes | str, *, pairs: bool = False) -> Any:
    """What a JSON text says.

    Args:
        raw: the text; bytes in UTF-8, UTF-16 or UTF-32.
        pairs: give objects as :class:`Pairs` and not as dicts.

    Raises:
        ValueError: it is no JSON, nested too deeply, or holds an integer beyond 64 bits.
    """
    try:
        return json.loads(raw, parse_int=_integer, object_pairs_hook=Pairs if pairs else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(file: Path, *, pairs: bool = False) -> Any:
    """What a file says; arguments and errors as for :func:`parse_json`.

    Raises:
        OSError: it cannot be read.
        ValueError: also where it is no file, as a pipe, which would be waited for.
    """
    if file.exists() and not file.is_file():
        raise ValueError("it is no file")
    return parse_json(file.read_bytes(), pairs=pairs)


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} characters")
    return int(text)
