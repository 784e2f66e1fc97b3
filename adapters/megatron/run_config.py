"""``run_config.yaml`` beside the weights: from it Megatron-Bridge builds the model of a distributed checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from glm5next_plugin.architecture import Architecture

RUN_CONFIG = "run_config.yaml"
# Megatron-Bridge instantiates only what it is told to trust: see registration
TARGET = "glm5next_plugin.adapters.megatron.provider.Glm5NextProvider.from_released_config"


def write_run_config(directory: Path, architecture: Architecture, dtype: torch.dtype) -> None:
    """Write it into the directory of a distributed checkpoint.

    Args:
        directory: with the ``*.distcp`` files.
        architecture: its released config is kept whole, so that the directory can be moved.
        dtype: of the weights: bfloat16 or float32.
    """
    model = {
        "_target_": TARGET,
        "config": architecture.released_config(),
        "bf16": dtype == torch.bfloat16,
        # the layout that it was "saved" in, which Megatron-Bridge compares with the one that loads it
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    (directory / RUN_CONFIG).write_text(yaml.safe_dump({"model": model}, sort_keys=False))
