"""The safetensors files of a directory and their index: which file holds which tensor, and whether they agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .header import Entry, HeaderError, read_header
from .weight_map import read_weight_map

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Shards:
    """Headers by file name, and what is wrong with files and index; each fault names its file."""

    headers: dict[str, list[Entry]]
    faults: list[str]


def read_shards(directory: Path) -> Shards:
    """Read the headers of the files that the index names, or of the single file where there is no index.

    Raises:
        InputError: an index that is no index.
    """
    faults: list[str] = []
    index = None
    if (directory / INDEX_NAME).is_file():
        index, faults = read_weight_map(directory / INDEX_NAME)
    there = {file.name for file in directory.glob("model*.safetensors")}
    if index is not None:
        files = sorted(set(index.values()))
        faults += [f"{file} is there, but {INDEX_NAME} does not name it" for file in sorted(there - set(files))]
    else:
        files = sorted(there & {SINGLE_NAME})
        if there - {SINGLE_NAME}:
            faults.append(f"{INDEX_NAME} is missing; there are shards: {', '.join(sorted(there - {SINGLE_NAME}))}")
        elif not files:
            faults.append(f"neither {INDEX_NAME} nor {SINGLE_NAME} is there")
    headers = {}
    for file in files:
        try:
            headers[file] = read_header(directory / file)
        except FileNotFoundError:
            named = sum(holder == file for holder in (index or {}).values())
            faults.append(f"{file} is missing; {INDEX_NAME} names {named} tensors in it")
        except (HeaderError, OSError) as error:
            faults.append(f"{file}: {error}")
    if index is not None:
        faults += _disagreements(index, headers)
    return Shards(headers, faults)


def _disagreements(index: dict[str, str], headers: dict[str, list[Entry]]) -> list[str]:
    held = {file: {entry.name for entry in entries} for file, entries in headers.items()}
    faults = [
        f"{INDEX_NAME} names {name} in {file}, which does not hold it"
        for name, file in index.items()
        if file in held and name not in held[file]
    ]
    for file, names in held.items():
        faults += [f"{name} in {file} is not in {INDEX_NAME}" for name in sorted(names - index.keys())]
    return faults
