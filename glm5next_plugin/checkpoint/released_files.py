"""Files of a released checkpoint beside its tensors: names of shards, index and config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from glm5next_plugin.architecture import Architecture

WrittenDtype = Literal["bfloat16", "float32", "keep"]


def shard_name(number: int, count: int) -> str:
    """Name of shard ``number`` (from 1) of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index_content(weight_map: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """Content of the index: file of each tensor, and bytes of all of them."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def written_config(
    architecture: Architecture, *, dtype: WrittenDtype, mtp: bool, quantization: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``config.json`` of what was written.

    Args:
        architecture: the model.
        dtype: of the tensors; ``"keep"`` leaves what the config says.
        mtp: whether the MTP layers were written; without them the config counts none.
        quantization: ``quantization_config``; None for a checkpoint without FP8.
    """
    config = architecture.released_config()
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    if dtype != "keep":
        config["dtype"] = config["text_config"]["dtype"] = dtype
    if not mtp:
        config["text_config"]["num_nextn_predict_layers"] = 0
    return config


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read."""
    file.write_text(json.dumps(content, indent=2) + "\n")
