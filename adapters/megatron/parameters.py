"""Parameters that a module of ours owns itself: where they live, how they are split, how they are checkpointed."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint


def parameter_device(config: TransformerConfig) -> torch.device | int | str:
    """Where parameters are created, as the stock linears do it."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def mark_split(parameter: torch.nn.Parameter) -> None:
    """Tell megatron-core that axis 0 is split over TP; else only TP rank 0 counts in the gradient norm."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = 0
    parameter.partition_stride = 1


def mark_partial_gradient(parameter: torch.nn.Parameter, config: TransformerConfig) -> None:
    """A parameter replicated over TP whose gradient is a partial sum under sequence parallel: add it up over TP."""
    parameter.sequence_parallel = config.sequence_parallel


def sharded_split_parameters(
    module: MegatronModule, names: tuple[str, ...], prefix: str, sharded_offsets: tuple, metadata: dict | None
) -> ShardedStateDict:
    """Checkpoint entries of a module's own parameters that are split over TP along axis 0."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    return make_sharded_tensors_for_checkpoint(
        {name: getattr(module, name) for name in names},
        prefix,
        {name: 0 for name in names},
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
