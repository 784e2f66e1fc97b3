"""Files that belong to a checkpoint beside its tensors: tokenizer, generation config, chat template, processors."""

from __future__ import annotations

import shutil
from pathlib import Path

_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}


def companion_files(directory: Path) -> list[Path]:
    """Companions in a checkpoint directory: every small file but ``config.json`` and weight indices."""
    return sorted(
        file
        for file in directory.iterdir()
        if file.is_file()
        and (file.suffix in _SUFFIXES or file.name == "LICENSE")
        and file.name != "config.json"
        and not file.name.endswith(".index.json")
    )


def copy_companions(source: Path, target: Path) -> None:
    """Copy the companions of ``source`` into the directory ``target``; config.json is none, since it changes."""
    for file in companion_files(source):
        shutil.copyfile(file, target / file.name)
