"""Checkpoints with one thing changed, written with safetensors alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory by its stored name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def write_single_file(
    target: Path, config: dict, tensors: dict[str, torch.Tensor], companions_from: Path | None = None
) -> Path:
    """A checkpoint of one file without an index."""
    target.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    (target / "config.json").write_text(json.dumps(config))
    if companions_from is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(companions_from / name, target)
    return target


def edited(
    source: Path,
    target: Path,
    tensors: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    config: Callable[[dict], None] = lambda config: None,
) -> Path:
    """A single-file copy of ``source`` after both functions changed what they are given."""
    content, settings = stored_tensors(source), json.loads((source / "config.json").read_text())
    tensors(content)
    config(settings)
    return write_single_file(target, settings, content)
