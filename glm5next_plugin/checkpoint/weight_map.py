"""Indices of safetensors files: a JSON object whose ``weight_map`` says which file holds which tensor."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from glm5next_plugin.errors import InputError
from glm5next_plugin.json_text import Pairs, read_json

_NAME_BYTES = 255  # of a file, on any common file system


def read_weight_map(file: Path) -> tuple[dict[str, str], list[str]]:
    """File of each tensor, and names that stand more than once, as faults.

    Raises:
        InputError: no such index, or one that names what can be no tensor or no file beside it.
    """
    try:
        pairs = dict(read_json(file, pairs=True))["weight_map"]
        if not isinstance(pairs, Pairs):
            raise TypeError(f"weight_map is a {type(pairs).__name__}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file}: no JSON object with a weight_map ({error})") from error
    for name, holder in pairs:
        if not is_tensor_name(name):
            raise InputError(f"{file}: {name!a:.200} can be no tensor's name")
        if not is_file_name(holder):
            raise InputError(f"{file}: {name} is said to lie in {holder!a:.200}, which is no file beside it")
    counted = collections.Counter(name for name, _ in pairs)
    return dict(pairs), [f"{name} stands {count} times in {file.name}" for name, count in counted.items() if count > 1]


def is_tensor_name(name: Any) -> bool:
    """Whether it is a text that an error can name in one line."""
    return isinstance(name, str) and name.isprintable()


def is_file_name(name: Any) -> bool:
    """Whether it names a file of the same directory, and not one elsewhere."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > _NAME_BYTES:
        return False
    return name not in ("", "..") and Path(name).name == name
