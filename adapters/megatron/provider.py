"""The transformer config of the model, and the provider that builds it in Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.bridge.models.mla_provider import MLAModelProvider

from glm5next_plugin.architecture import Architecture

from .layer_spec import glm5next_layer_spec
from .validation import validate_config


@dataclass
class Glm5NextProvider(MLAModelProvider):
    """A TransformerConfig that carries the :class:`Architecture` and provides a GPTModel of it.

    Build it with :meth:`from_architecture`, or through AutoBridge. Parallel sizes, precision and recompute are the
    user's; settings that would change the model's numbers are refused by ``provide`` (:mod:`.validation`).
    """

    architecture: Architecture | None = None
    transformer_layer_spec: Callable[..., Any] = glm5next_layer_spec

    normalization: str = "RMSNorm"
    gated_linear_unit: bool = True
    activation_func: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu
    add_bias_linear: bool = False
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "none"
    qk_layernorm: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    # pad only where TP does not divide the vocabulary: the released size is a multiple of 128 already
    should_pad_vocab: bool = True
    make_vocab_size_divisible_by: int = 1

    # the clamp is ours on every path; stating it keeps exporters and FLOP counters informed
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    masked_softmax_fusion: bool = False
    apply_rope_fusion: bool = False
    persist_layer_norm: bool = False
    cross_entropy_loss_fusion: bool = False
    gradient_accumulation_fusion: bool = False

    moe_grouped_gemm: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_router_dtype: str = "fp32"
    moe_router_score_function: str = "sigmoid"
    moe_router_pre_softmax: bool = True
    moe_router_enable_expert_bias: bool = True
    moe_router_bias_update_rate: float = 0.0
    moe_router_load_balancing_type: str = "none"
    moe_aux_loss_coeff: float = 0.0
    moe_shared_expert_overlap: bool = False
    moe_token_dispatcher_type: str = "alltoall"
    expert_tensor_parallel_size: int = 1

    # streams are wider than hidden_size between pipeline stages, and layers differ in kind
    variable_seq_lengths: bool = True
    hetereogenous_dist_checkpoint: bool = True
    rotary_scaling_factor: float = 1.0
    mscale_all_dim: float = 0.0

    @classmethod
    def from_architecture(cls, architecture: Architecture, **overrides: Any) -> Self:
        """The provider of a checkpoint's architecture.

        Args:
            architecture: sizes and schedule of the model.
            overrides: fields of the provider, such as ``tensor_model_parallel_size=2`` or ``bf16=True``.
        """
        a = architecture
        values: dict[str, Any] = dict(
            architecture=a,
            num_layers=a.num_hidden_layers,
            hidden_size=a.hidden_size,
            ffn_hidden_size=a.intermediate_size,
            num_attention_heads=a.num_attention_heads,
            num_query_groups=a.num_attention_heads,
            kv_channels=a.qk_head_dim,
            layernorm_epsilon=a.rms_norm_eps,
            init_method_std=a.initializer_range,
            vocab_size=a.vocab_size,
            seq_length=a.max_position_embeddings,
            q_lora_rank=a.q_lora_rank,
            kv_lora_rank=a.kv_lora_rank,
            qk_head_dim=a.qk_head_dim,
            qk_pos_emb_head_dim=0,
            v_head_dim=a.v_head_dim,
            activation_func_clamp_value=a.swiglu_limit,
            num_moe_experts=a.n_routed_experts,
            moe_ffn_hidden_size=a.moe_intermediate_size,
            moe_shared_expert_intermediate_size=a.moe_intermediate_size * a.n_shared_experts,
            moe_router_topk=a.num_experts_per_tok,
            moe_router_topk_scaling_factor=a.routed_scaling_factor,
            moe_layer_freq=[int(kind == "moe") for kind in a.mlp_kinds],
        )
        values.update(overrides)
        return cls(**values)

    @classmethod
    def from_released_config(cls, config: Mapping[str, Any], *, bf16: bool = True, **overrides: Any) -> Self:
        """The provider of a ``config.json``, as ``run_config.yaml`` names it to Megatron-Bridge.

        Args:
            config: its content.
            bf16: whether parameters are bfloat16; float32 otherwise.
            overrides: fields of the provider.

        Raises:
            ConfigError: not a config of this model.
        """
        dtype = torch.bfloat16 if bf16 else torch.float32
        return cls.from_architecture(Architecture.from_config(config), bf16=bf16, params_dtype=dtype, **overrides)

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        """Build the GPTModel of this stage.

        Raises:
            glm5next_plugin.errors.InputError: a setting that would change the model's numbers.
        """
        validate_config(self)
        return super().provide(pre_process, post_process, vp_stage)
