"""Megatron-Bridge's bridge of the model: a table of names, and checks that nothing is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    ColumnParallelMapping,
    GatedMLPMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.core.models.gpt.gpt_model import GPTModel

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.inventory import FP32_KINDS, expected_tensors
from glm5next_plugin.errors import InputError

from .provider import Glm5NextProvider
from .released_source import ReleasedSource, checkpoint_directory

_LAYER = "decoder.layers.*."
_DISK = "model.language_model.layers.*."

# Megatron's name below a layer -> the name on disk below a layer
_REPLICATED = {
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    # KDA
    "self_attention.linear_f_a.weight": "self_attn.f_a_proj.weight",
    "self_attention.linear_g_a.weight": "self_attn.g_a_proj.weight",
    "self_attention.o_norm.weight": "self_attn.o_norm.weight",
    # DSA
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.indexer.wq_b.weight": "self_attn.indexer.wq_b.weight",
    "self_attention.indexer.wk.weight": "self_attn.indexer.wk.weight",
    "self_attention.indexer.weights_proj.weight": "self_attn.indexer.weights_proj.weight",
    "self_attention.indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "self_attention.indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "self_attention.indexer.index_kpool_compress_gate": "self_attn.indexer.index_kpool_compress_gate",
    "self_attention.indexer.index_kpool_compress_ape": "self_attn.indexer.index_kpool_compress_ape",
    # MoE
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_COLUMN = {
    # KDA
    "self_attention.linear_q.weight": "self_attn.q_proj.weight",
    "self_attention.linear_k.weight": "self_attn.k_proj.weight",
    "self_attention.linear_v.weight": "self_attn.v_proj.weight",
    "self_attention.linear_beta.weight": "self_attn.b_proj.weight",
    "self_attention.linear_f_b.weight": "self_attn.f_b_proj.weight",
    "self_attention.linear_g_b.weight": "self_attn.g_b_proj.weight",
    "self_attention.q_conv1d.weight": "self_attn.q_conv1d.weight",
    "self_attention.k_conv1d.weight": "self_attn.k_conv1d.weight",
    "self_attention.v_conv1d.weight": "self_attn.v_conv1d.weight",
    "self_attention.A_log": "self_attn.A_log",
    "self_attention.dt_bias": "self_attn.dt_bias",
    # DSA
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
_ROW = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.experts.local_experts.*.linear_fc2.weight": "mlp.experts.*.down_proj.weight",
}
# fc1 holds gate above up
_GATE_UP = {
    "mlp.linear_fc1.weight": "mlp",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts",
    "mlp.experts.local_experts.*.linear_fc1.weight": "mlp.experts.*",
}
# outside the layers
_OUTSIDE = {
    "embedding.word_embeddings.weight": (ColumnParallelMapping, "model.language_model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": (ReplicatedMapping, "model.language_model.norm.weight"),
    "output_layer.weight": (ColumnParallelMapping, "lm_head.weight"),
}


@MegatronModelBridge.register_bridge(
    source="Glm5NextForConditionalGeneration", target=GPTModel, provider=Glm5NextProvider, model_type="glm5_next"
)
class Glm5NextBridge(MegatronModelBridge):
    """Weights of the text model between the released spelling and Megatron.

    Differences from the stock bridge: a checkpoint is read through our reader, so that all three spellings load and
    every name, shape and dtype is checked first; a tensor without a parameter, or a parameter without a tensor, is an
    error instead of a warning; exported tensors of the five fp32 kinds keep fp32. Vision and MTP tensors have no
    parameter here: :func:`.export.save_checkpoint` carries them over from the source.
    """

    def provider_bridge(self, hf_pretrained: Any) -> Glm5NextProvider:
        """The provider of the checkpoint's config (raw ``config.json`` where there is one)."""
        directory = checkpoint_directory(hf_pretrained)
        architecture = (
            Architecture.from_pretrained(directory) if directory else Architecture.from_config(hf_pretrained.config)
        )
        dtype = self.dtype_from_hf(hf_pretrained.config, default=torch.bfloat16)
        return Glm5NextProvider.from_architecture(
            architecture,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The tables above as mappings; new ones each time, since a mapping caches what it learnt of a layout."""
        mappings = [mapping(ours, disk) for ours, (mapping, disk) in _OUTSIDE.items()]
        mappings += [
            mapping(_LAYER + ours, _DISK + disk)
            for mapping, table in (
                (ReplicatedMapping, _REPLICATED),
                (ColumnParallelMapping, _COLUMN),
                (RowParallelMapping, _ROW),
            )
            for ours, disk in table.items()
        ]
        mappings += [
            GatedMLPMapping(_LAYER + ours, gate=f"{_DISK}{disk}.gate_proj.weight", up=f"{_DISK}{disk}.up_proj.weight")
            for ours, disk in _GATE_UP.items()
        ]
        return MegatronMappingRegistry(*mappings)

    def load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params=None):
        """Load a checked checkpoint directory into the model.

        Raises:
            InputError: the checkpoint has a missing, unknown or misshapen tensor, or no directory.
        """
        source = ReleasedSource.of(hf_pretrained)
        return super().load_weights_hf_to_megatron(source, megatron_model, allowed_mismatched_params)

    def build_conversion_tasks(self, hf_pretrained, megatron_model, weight_dtype=None):
        """The stock tasks, after a check that parameters and tensors of the text model pair off exactly.

        Raises:
            InputError: names every parameter without a tensor and every tensor without a parameter.
        """
        if not isinstance(hf_pretrained, ReleasedSource) and checkpoint_directory(hf_pretrained):
            hf_pretrained = ReleasedSource.names_only(megatron_model[0].config.architecture)
        names = self._megatron_global_param_names_all_pp_ranks(megatron_model)
        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, weight_dtype)
        unmapped = [name for name, task in zip(names, tasks, strict=True) if task is None]
        config = megatron_model[0].config
        mapped = {name for task in tasks if task is not None for name in _disk_names(task.mapping.hf_param)}
        unread = _text_names_of_rank(config) - mapped
        if unmapped or unread:
            raise InputError(
                "the model and the checkpoint do not pair off: "
                f"parameters without a tensor: {sorted(unmapped) or 'none'}; "
                f"tensors without a parameter: {sorted(unread) or 'none'}"
            )
        return tasks

    @staticmethod
    def _cast_export_weight_dtype(weights, weight_dtype):
        """Cast exported tensors, the five fp32 kinds excepted."""
        cast = MegatronModelBridge._cast_export_weight_dtype(weights, weight_dtype)
        return {name: weights[name] if name.endswith(FP32_KINDS) else cast[name] for name in weights}


def _disk_names(hf_param: str | Mapping[str, str]) -> list[str]:
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def _text_names_of_rank(config: Any) -> set[str]:
    """Text tensors whose parameter some rank of this pipeline group holds: all but other EP ranks' experts."""
    from megatron.core import parallel_state

    ep = parallel_state.get_expert_model_parallel_world_size()
    per_rank = config.architecture.n_routed_experts // ep
    first = parallel_state.get_expert_model_parallel_rank() * per_rank
    names = set()
    for name in expected_tensors(config.architecture, vision=False, mtp=False):
        _, separator, rest = name.partition(".mlp.experts.")
        if not separator or first <= int(rest.split(".")[0]) < first + per_rank:
            names.add(name)
    return names
