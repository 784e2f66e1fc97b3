"""The layer specs of the model: what each block of this pipeline stage is built from."""

from __future__ import annotations

import functools

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from .dsa import SparseLatentAttention
from .kda import KimiDeltaAttention
from .layer import HyperConnectedLayer
from .mlp import ClampedExperts, ClampedMLP, ClampedSharedExpertMLP
from .norm import RMSNorm
from .router import SigmoidRouter
from .validation import validate_config


def glm5next_layer_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Specs of the layers that this pipeline (and virtual pipeline) stage builds, and the final norm.

    Args:
        config: a TransformerConfig with an ``architecture``, such as :class:`.provider.Glm5NextProvider`.
        vp_stage: virtual stage, where there are several.

    Raises:
        glm5next_plugin.errors.InputError: a setting of ``config`` that would change the model's numbers.
    """
    validate_config(config)
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, index) for index in _local_layers(config, vp_stage)], layer_norm=RMSNorm
    )


def _local_layers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """0-based global indices of the layers of this stage."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage)))


def _layer(config: TransformerConfig, index: int) -> ModuleSpec:
    architecture = config.architecture
    attention = KimiDeltaAttention if architecture.attention_kinds[index] == "kda" else SparseLatentAttention
    return ModuleSpec(
        module=HyperConnectedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=attention),
            pre_mlp_layernorm=RMSNorm,
            mlp=_dense_mlp(config) if architecture.mlp_kinds[index] == "dense" else _moe(),
        ),
    )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _dense_mlp(config: TransformerConfig):
    return functools.partial(ClampedMLP.as_mlp_submodule, submodules=_linears(), ffn_hidden_size=config.ffn_hidden_size)


def _moe():
    return functools.partial(
        MoELayer,
        submodules=MoESubmodules(
            router=SigmoidRouter,
            experts=functools.partial(ClampedExperts, submodules=_linears()),
            shared_experts=functools.partial(ClampedSharedExpertMLP, submodules=_linears()),
        ),
    )
