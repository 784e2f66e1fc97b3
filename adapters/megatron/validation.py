"""Settings of megatron-core that would change the model's numbers, or fail late: refused when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

# setting -> (values that keep the numbers, what happens otherwise)
_REQUIRED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias_activation_fusion": ((False,), "the fused SwiGLU drops the clamp"),
    "use_te_activation_func": ((False,), "TransformerEngine's activation drops the clamp"),
    "use_transformer_engine_op_fuser": ((False,), "fused MLPs drop the clamp"),
    "moe_shared_expert_overlap": ((False,), "the overlapped shared expert drops the clamp"),
    "moe_router_fusion": ((False,), "the fused router cannot be replayed and breaks ties otherwise"),
    "moe_router_dtype": (("fp32",), "expert biases near 7 need fp32 router logits"),
    "moe_router_score_function": (("sigmoid",), "the router scores with a sigmoid"),
    "moe_router_enable_expert_bias": ((True,), "experts are chosen by score plus bias"),
    "moe_router_bias_update_rate": ((0, 0.0), "bias updates make the trainer drift from the rollout"),
    "moe_router_load_balancing_type": (("none",), "balancing losses change the gradient"),
    "moe_z_loss_coeff": ((None, 0), "a z-loss changes the gradient"),
    "moe_input_jitter_eps": ((None, 0), "jitter changes the choice of experts"),
    "moe_expert_capacity_factor": ((None,), "a capacity drops tokens"),
    "moe_apply_probs_on_input": ((False,), "the routing weight applies after down_proj"),
    "moe_router_force_load_balancing": ((False,), "forced balancing ignores the router"),
    "moe_router_force_biased": ((None,), "forced biases ignore the router"),
    "moe_router_num_groups": ((None, 0, 1), "experts are not grouped"),
    "moe_shared_expert_gate": ((False,), "the shared expert has no gate"),
    "moe_latent_size": ((None,), "experts work on the hidden width"),
    "moe_grouped_gemm": ((False,), "the grouped experts of megatron-core need TransformerEngine and drop the clamp"),
    "add_bias_linear": ((False,), "no projection has a bias"),
    "gated_linear_unit": ((True,), "the MLPs are SwiGLU"),
    "glu_linear_offset": ((0, 0.0), "the MLPs are plain SwiGLU"),
    "fp32_residual_connection": ((False,), "the residual is the hyper-connection streams"),
    "hidden_dropout": ((0, 0.0), "the hyper-connections have no dropout"),
    "attention_dropout": ((0, 0.0), "the attention has no dropout"),
    "experimental_attention_variant": ((None,), "attention comes from the layer spec"),
    "fp8": ((None, False), "operators compute in bf16 or fp32"),
    "fp4": ((None, False), "operators compute in bf16 or fp32"),
    "recompute_granularity": ((None, "full"), "selective recompute lives in hooks that these layers do not call"),
    "cuda_graph_impl": (("none", None), "graph capture bypasses the layers' forward"),
    "overlap_moe_expert_parallel_comm": ((False,), "the overlapped schedule bypasses the layers' forward"),
    "delay_wgrad_compute": ((False,), "delayed weight gradients need TransformerEngine linears"),
    "expert_tensor_parallel_size": ((1,), "experts are split over expert parallel ranks, never within"),
    "mtp_num_layers": ((None, 0), "the MTP layer is not trained: its tensors are carried over"),
    "hetereogenous_dist_checkpoint": ((True,), "a checkpoint would assume that all layers are alike"),
}

# setting -> what the architecture says
_FROM_ARCHITECTURE: dict[str, Callable[[Architecture], Any]] = {
    "num_layers": lambda a: a.num_hidden_layers,
    "hidden_size": lambda a: a.hidden_size,
    "ffn_hidden_size": lambda a: a.intermediate_size,
    "num_attention_heads": lambda a: a.num_attention_heads,
    "layernorm_epsilon": lambda a: a.rms_norm_eps,
    "num_moe_experts": lambda a: a.n_routed_experts,
    "moe_ffn_hidden_size": lambda a: a.moe_intermediate_size,
    "moe_shared_expert_intermediate_size": lambda a: a.moe_intermediate_size * a.n_shared_experts,
    "moe_router_topk": lambda a: a.num_experts_per_tok,
    "moe_router_topk_scaling_factor": lambda a: a.routed_scaling_factor,
    "moe_layer_freq": lambda a: [int(kind == "moe") for kind in a.mlp_kinds],
}


def validate_config(config: Any) -> None:
    """Refuse a transformer config that would train another model than its ``architecture``.

    Raises:
        InputError: every setting at fault, with what was found, what is needed and why.
    """
    architecture = getattr(config, "architecture", None)
    if not isinstance(architecture, Architecture):
        raise InputError(
            f"config.architecture is {architecture!r}; needed: the Architecture of the checkpoint "
            "(Architecture.from_pretrained(path)), as Glm5NextProvider.from_architecture sets it"
        )
    faults = [
        _fault(name, getattr(config, name), allowed[0], why)
        for name, (allowed, why) in _REQUIRED.items()
        if hasattr(config, name) and getattr(config, name) not in allowed
    ]
    for name, expected_of in _FROM_ARCHITECTURE.items():
        expected = expected_of(architecture)
        if getattr(config, name) != expected:
            faults.append(_fault(name, getattr(config, name), expected, "the checkpoint's config says so"))
    faults += _parallel_faults(config, architecture)
    if faults:
        raise InputError("settings that this model cannot be trained with:\n  " + "\n  ".join(faults))


def _parallel_faults(config: Any, architecture: Architecture) -> list[str]:
    faults = []
    tp, pp, ep, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.expert_model_parallel_size,
        config.context_parallel_size,
    )
    if tp > 1 and not config.sequence_parallel:
        faults.append(
            _fault("sequence_parallel", False, True, f"tensor_model_parallel_size is {tp}: gradients would be lost")
        )
    for what, count in (
        ("num_attention_heads", architecture.num_attention_heads),
        ("linear_attn_config.num_heads", architecture.kda_num_heads),
        ("intermediate_size", architecture.intermediate_size),
    ):
        if count % tp:
            faults.append(f"tensor_model_parallel_size is {tp}; needed: a divisor of {what} ({count})")
    if cp > 1 and architecture.kda_num_heads % (tp * cp):
        faults.append(
            f"context_parallel_size is {cp}; needed: with tensor_model_parallel_size ({tp}) a divisor of "
            f"linear_attn_config.num_heads ({architecture.kda_num_heads}), since KDA splits its heads over both"
        )
    if architecture.n_routed_experts % ep:
        faults.append(
            f"expert_model_parallel_size is {ep}; needed: a divisor of n_routed_experts "
            f"({architecture.n_routed_experts})"
        )
    if pp > 1:
        if not config.variable_seq_lengths:
            faults.append(
                _fault(
                    "variable_seq_lengths", False, True, "between stages the hidden states are hc_mult times as wide"
                )
            )
        if (config.virtual_pipeline_model_parallel_size or 1) > 1 and (
            config.batch_p2p_comm or not config.overlap_p2p_comm
        ):
            faults.append(
                _fault(
                    "batch_p2p_comm, overlap_p2p_comm",
                    (config.batch_p2p_comm, config.overlap_p2p_comm),
                    (False, True),
                    "other settings give wrong gradients with virtual stages",
                )
            )
    if config.variable_seq_lengths and config.moe_token_dispatcher_type == "allgather":
        faults.append(
            _fault("moe_token_dispatcher_type", "allgather", "alltoall", "allgather needs equal sequence lengths")
        )
    return faults


def _fault(name: str, found: Any, needed: Any, why: str) -> str:
    return f"{name} is {found!r}; needed: {needed!r} ({why})"
