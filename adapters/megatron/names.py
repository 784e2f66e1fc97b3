"""Megatron's names of the text model's weights and the released ones, and where each lies in a torch_dist checkpoint.

Plain tables: the bridge makes its mappings of them, and a conversion needs no Megatron to know what a checkpoint holds.
"""

from __future__ import annotations

import dataclasses
import re

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.inventory import expected_tensors, split_layer

LAYER = "decoder.layers.*."

# Megatron's name below a layer -> the name on disk below a layer
REPLICATED = {
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
COLUMN = {
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
ROW = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.experts.local_experts.*.linear_fc2.weight": "mlp.experts.*.down_proj.weight",
}
# fc1 holds gate above up
GATE_UP = {
    "mlp.linear_fc1.weight": "mlp",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts",
    "mlp.experts.local_experts.*.linear_fc1.weight": "mlp.experts.*",
}
# outside the layers
OUTSIDE = {
    "embedding.word_embeddings.weight": ("column", "model.language_model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("replicated", "model.language_model.norm.weight"),
    "output_layer.weight": ("column", "lm_head.weight"),
}

_EXPERTS = "mlp.experts.local_experts.*."
# in a distributed checkpoint the experts of a layer are one tensor, with a first dimension that counts them
_STACKED_EXPERTS = "mlp.experts.experts."
# modules that save the state of an FP8 recipe beside their weight, empty without one: the stock linears
_EXTRA_STATE = "_extra_state"
_PLAIN_PARAMETERS = ("q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a released tensor lies in a distributed checkpoint.

    Attributes:
        key: of the global tensor.
        shape: of the global tensor.
        offset: first index of the released tensor in it.
        box: its size in each dimension: its shape, with a 1 before it where experts are stacked.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]


def placements(architecture: Architecture) -> dict[str, Placement]:
    """Placement of every tensor of the text model by released name, in writing order."""
    found = {}
    for name, spec in expected_tensors(architecture, vision=False, mtp=False).items():
        layer, expert, below = _split(name)
        key, part, parts = _KEYS[below]
        shape = (parts * spec.shape[0], *spec.shape[1:])
        offset = (part * spec.shape[0], *(0 for _ in spec.shape[1:]))
        box = spec.shape
        if expert is not None:
            shape, offset, box = (architecture.n_routed_experts, *shape), (expert, *offset), (1, *box)
        found[name] = Placement(key if layer is None else LAYER.replace("*", str(layer)) + key, shape, offset, box)
    return found


def extra_state_keys(architecture: Architecture) -> list[str]:
    """Keys of the objects that megatron-core saves beside the tensors: one a linear, one an expert and linear."""
    linears = {module for module in (key.removesuffix("weight") for key in (*COLUMN, *ROW, *GATE_UP))}
    linears = {module for module in linears if not module.removesuffix(".").endswith(_PLAIN_PARAMETERS)}
    keys: dict[str, None] = {}
    for placement in placements(architecture).values():
        module = placement.key.removesuffix("weight")
        below = re.sub(r"^decoder\.layers\.\d+\.", "", module).replace(_STACKED_EXPERTS, _EXPERTS)
        if below in linears:
            shard, shards = (placement.offset[0], placement.shape[0]) if _STACKED_EXPERTS in module else (0, 1)
            keys[f"{module}{_EXTRA_STATE}/shard_{shard}_{shards}"] = None
    return list(keys)


def _split(name: str) -> tuple[int | None, int | None, str]:
    """Layer, expert and what is left, with ``*`` for the expert."""
    layer, below = split_layer(name)
    expert = re.match(r"mlp\.experts\.(\d+)\.", below)
    if expert is None:
        return layer, None, below
    return layer, int(expert[1]), below.replace(f".{expert[1]}.", ".*.", 1)


def _key_table() -> dict[str, tuple[str, int, int]]:
    """Released name below a layer -> key below a layer, part and number of parts along its rows."""
    table = {disk: (key, 0, 1) for key, (_, disk) in OUTSIDE.items()}
    for ours, disk in (*REPLICATED.items(), *COLUMN.items(), *ROW.items()):
        table[disk] = (ours.replace(_EXPERTS, _STACKED_EXPERTS), 0, 1)
    for ours, disk in GATE_UP.items():
        key = ours.replace(_EXPERTS, _STACKED_EXPERTS)
        table |= {f"{disk}.gate_proj.weight": (key, 0, 2), f"{disk}.up_proj.weight": (key, 1, 2)}
    return table


_KEYS = _key_table()
