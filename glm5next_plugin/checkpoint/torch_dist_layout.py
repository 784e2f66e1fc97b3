"""Where things are in a directory of a torch_dist checkpoint that ``glm5next convert`` writes and reads.

::

    latest_checkpointed_iteration.txt   "release", or the number of a training iteration
    release/ or iter_NNNNNNN/           the distributed checkpoint of the text model
    hf/                                 config.json, tokenizer and generation files
    hf/carried.safetensors              vision and MTP tensors, which no Megatron parameter holds
"""

from __future__ import annotations

from pathlib import Path

from glm5next_plugin.errors import InputError

MARKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMPANIONS = "hf"
CARRIED = "carried.safetensors"


def is_torch_dist(path: str | Path) -> bool:
    """Whether a directory has the marker of this layout."""
    return (Path(path) / MARKER).is_file()


def weights_directory(path: str | Path) -> Path:
    """The distributed checkpoint that the marker names.

    Raises:
        InputError: no marker, one that cannot be understood, or a file that is missing.
    """
    root = Path(path)
    if not is_torch_dist(root):
        raise InputError(f"{root} is no torch_dist checkpoint: it has no {MARKER}")
    name = (root / MARKER).read_text().strip()
    if name != RELEASE and not name.isdecimal():
        raise InputError(f"{root / MARKER} says {name!r}; needed: {RELEASE!r} or the number of an iteration")
    weights = root / (name if name == RELEASE else f"iter_{int(name):07d}")
    for needed in (weights / "metadata.json", root / COMPANIONS / "config.json", root / COMPANIONS / CARRIED):
        if not needed.is_file():
            raise InputError(f"{root} is incomplete: {needed.relative_to(root)} is missing")
    return weights
