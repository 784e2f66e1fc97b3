"""Megatron's distributed checkpoints of the model's weights, in any parallel layout."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from glm5next_plugin.errors import InputError


def _sharded_state(models: list[MegatronModule]) -> dict:
    """One entry a model chunk, under the keys that Megatron's own checkpoints use."""
    models = unwrap_model(models)
    if len(models) == 1:
        return {"model": models[0].sharded_state_dict()}
    return {f"model{stage}": model.sharded_state_dict() for stage, model in enumerate(models)}


def save_torch_dist(models: list[MegatronModule], directory: str | Path) -> None:
    """Write the weights as a distributed checkpoint. Collective; ``directory`` must exist and be empty.

    Args:
        models: the model chunks of this rank, wrapped or not.
        directory: what ``dist_checkpointing.load`` takes later.
    """
    state = {**_sharded_state(models), "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(state, str(directory))


def load_torch_dist(models: list[MegatronModule], directory: str | Path) -> None:
    """Load the weights of a distributed checkpoint, whatever layout it was saved in. Collective.

    Raises:
        InputError: not a distributed checkpoint, or one with missing or additional weights.
    """
    if not (Path(directory) / "metadata.json").is_file():
        raise InputError(f"{directory} is no distributed checkpoint: it has no metadata.json")
    state = _sharded_state(models)
    loaded, missing, unexpected = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RETURN_ALL)
    # what a training framework saves beside the weights is no fault here
    unexpected = {key for key in unexpected if not key.startswith(("optimizer.", "opt_param_scheduler", "rng_state"))}
    if missing or unexpected:
        raise InputError(
            f"{directory}: weights that the model lacks: {sorted(unexpected) or 'none'}; "
            f"weights that the checkpoint lacks: {sorted(missing) or 'none'}"
        )
    for key, model in zip(sorted(k for k in loaded if k.startswith("model")), unwrap_model(models), strict=True):
        model.load_state_dict(loaded[key], strict=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
