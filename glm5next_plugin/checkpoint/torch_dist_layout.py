"""Where things are in a directory of a torch_dist checkpoint that ``glm5next convert`` writes and reads.

::

    latest_checkpointed_iteration.txt   "release", or the number of a training iteration
    release/ or iter_NNNNNNN/           the distributed checkpoint of the text model
    hf/                                 config.json, tokenizer and generation files
    hf/carried-NNNNN.safetensors        vision and MTP tensors, which no Megatron parameter holds
    hf/carried.index.json               which file holds which of them
"""

from __future__ import annotations

import re
from pathlib import Path

from glm5next_plugin.errors import InputError

from .torch_dist_format import FORMAT

MARKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMPANIONS = "hf"


def is_torch_dist(path: str | Path) -> bool:
    """Whether a directory is of this layout, or a distributed checkpoint itself."""
    return (Path(path) / MARKER).is_file() or (Path(path) / FORMAT).is_file()


def weights_directory(path: str | Path) -> Path:
    """The distributed checkpoint that the marker names, or the directory itself if it is one.

    Raises:
        InputError: neither, or a marker that cannot be understood.
    """
    root = Path(path)
    if (root / FORMAT).is_file():
        return root
    if not is_torch_dist(root):
        raise InputError(f"{root} is no torch_dist checkpoint: it has neither {MARKER} nor {FORMAT}")
    name = (root / MARKER).read_text(encoding="utf-8", errors="replace").strip()
    if name != RELEASE and not re.fullmatch("[0-9]{1,12}", name):
        raise InputError(f"{root / MARKER} says {name!a:.200}; needed: {RELEASE!r} or the number of an iteration")
    weights = root / (name if name == RELEASE else f"iter_{int(name):07d}")
    if not (weights / FORMAT).is_file():
        raise InputError(f"{root} is incomplete: {weights.relative_to(root) / FORMAT} is missing")
    return weights


def companions_directory(path: str | Path) -> Path | None:
    """The ``hf`` directory of a checkpoint, beside the one with the weights; None if there is none."""
    weights = weights_directory(path)
    found = [folder / COMPANIONS for folder in (Path(path), weights.parent)]
    return next((folder for folder in found if (folder / "config.json").is_file()), None)


def needs_base(path: str | Path) -> bool:
    """Whether a directory is a distributed checkpoint without the companions of its model."""
    return is_torch_dist(path) and companions_directory(path) is None
