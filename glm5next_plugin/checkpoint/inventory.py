"""The 92 kinds of tensors of a released checkpoint (67 text, 25 vision): name, dtype, shape, FP8 or not.

The tables are written by hand and are the measure for reading and writing; nothing here is derived from a model class.
A kind is a name whose layer, block and expert numbers are replaced by ``*``; ``o_proj`` of KDA and of DSA are one kind
with two shapes. Every FP8 kind has its ``weight_scale_inv``, which is a kind of its own.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal

from glm5next_plugin.architecture import Architecture

Dtype = Literal["BF16", "F32", "F8_E4M3"]
Group = Literal[
    "embed_tokens",
    "lm_head",
    "norms",
    "hyper_connections",
    "kda",
    "dsa",
    "indexer",
    "dense_mlp",
    "router",
    "shared_experts",
    "routed_experts",
    "mtp",
    "vision",
]
Shape = tuple[int, ...]

LAYERS = "model.language_model.layers."
VISION = "model.visual."
SCALE_SUFFIX = "_scale_inv"

# Ends of the names of the five kinds that keep every fp32 bit: A_log, dt_bias, hc_*_base, hc_*_scale, the expert bias
FP32_KINDS = (
    ".A_log",
    ".dt_bias",
    ".hc_attn_base",
    ".hc_ffn_base",
    ".hc_attn_scale",
    ".hc_ffn_scale",
    ".e_score_correction_bias",
)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a checkpoint has to be.

    Attributes:
        dtype: in the spelling of safetensors headers.
        shape: sizes.
        kind: the name with ``*`` for layer, block and expert numbers.
        group: the class that counts it.
        fp8: whether the FP8 release stores it as FP8 with a scale.
    """

    dtype: Dtype
    shape: Shape
    kind: str
    group: Group
    fp8: bool = False


@dataclasses.dataclass(frozen=True)
class _Row:
    """One line of a table: name below its prefix, shape rule, dtype of the BF16 release, FP8 in the FP8 release."""

    name: str
    shape: Callable[[Any], Shape]
    dtype: Dtype = "BF16"
    fp8: bool = False


_NUMBER = re.compile(r"\.\d+\.")
_OF_LAYER = re.compile(r"(\d{1,6})\.(.+)", re.ASCII)  # of a name, what follows its prefix

_EMBED_TOKENS = (_Row("model.language_model.embed_tokens.weight", lambda a: (a.vocab_size, a.hidden_size)),)
_FINAL_NORM = (_Row("model.language_model.norm.weight", lambda a: (a.hidden_size,)),)
_LM_HEAD = (_Row("lm_head.weight", lambda a: (a.vocab_size, a.hidden_size)),)

# Below model.language_model.layers.N.
_HYPER_CONNECTIONS = (
    _Row("hc_attn_fn", lambda a: (a.hc_mix_width, a.hc_mult * a.hidden_size)),
    _Row("hc_attn_base", lambda a: (a.hc_mix_width,), "F32"),
    _Row("hc_attn_scale", lambda a: (3,), "F32"),
    _Row("hc_ffn_fn", lambda a: (a.hc_mix_width, a.hc_mult * a.hidden_size)),
    _Row("hc_ffn_base", lambda a: (a.hc_mix_width,), "F32"),
    _Row("hc_ffn_scale", lambda a: (3,), "F32"),
)
_LAYER_NORMS = (
    _Row("input_layernorm.weight", lambda a: (a.hidden_size,)),
    _Row("post_attention_layernorm.weight", lambda a: (a.hidden_size,)),
)
_KDA = (
    _Row("self_attn.q_proj.weight", lambda a: (a.kda_width, a.hidden_size)),
    _Row("self_attn.k_proj.weight", lambda a: (a.kda_width, a.hidden_size)),
    _Row("self_attn.v_proj.weight", lambda a: (a.kda_width, a.hidden_size)),
    _Row("self_attn.f_a_proj.weight", lambda a: (a.kda_head_dim, a.hidden_size)),
    _Row("self_attn.f_b_proj.weight", lambda a: (a.kda_width, a.kda_head_dim)),
    _Row("self_attn.g_a_proj.weight", lambda a: (a.kda_head_dim, a.hidden_size)),
    _Row("self_attn.g_b_proj.weight", lambda a: (a.kda_width, a.kda_head_dim)),
    _Row("self_attn.b_proj.weight", lambda a: (a.kda_num_heads, a.hidden_size)),
    _Row("self_attn.A_log", lambda a: (a.kda_num_heads,), "F32"),
    _Row("self_attn.dt_bias", lambda a: (a.kda_width,), "F32"),
    _Row("self_attn.q_conv1d.weight", lambda a: (a.kda_width, 1, a.short_conv_kernel_size)),
    _Row("self_attn.k_conv1d.weight", lambda a: (a.kda_width, 1, a.short_conv_kernel_size)),
    _Row("self_attn.v_conv1d.weight", lambda a: (a.kda_width, 1, a.short_conv_kernel_size)),
    _Row("self_attn.o_norm.weight", lambda a: (a.kda_head_dim,)),
    _Row("self_attn.o_proj.weight", lambda a: (a.hidden_size, a.kda_width)),
)
_DSA = (
    _Row("self_attn.q_a_proj.weight", lambda a: (a.q_lora_rank, a.hidden_size), fp8=True),
    _Row("self_attn.q_a_layernorm.weight", lambda a: (a.q_lora_rank,)),
    _Row("self_attn.q_b_proj.weight", lambda a: (a.num_attention_heads * a.qk_head_dim, a.q_lora_rank), fp8=True),
    _Row("self_attn.kv_a_proj_with_mqa.weight", lambda a: (a.kv_lora_rank, a.hidden_size), fp8=True),
    _Row("self_attn.kv_a_layernorm.weight", lambda a: (a.kv_lora_rank,)),
    _Row(
        "self_attn.kv_b_proj.weight",
        lambda a: (a.num_attention_heads * (a.qk_head_dim + a.v_head_dim), a.kv_lora_rank),
    ),
    _Row("self_attn.o_proj.weight", lambda a: (a.hidden_size, a.num_attention_heads * a.v_head_dim), fp8=True),
)
_INDEXER = (
    _Row("self_attn.indexer.wq_b.weight", lambda a: (a.index_n_heads * a.index_head_dim, a.q_lora_rank)),
    _Row("self_attn.indexer.wk.weight", lambda a: (a.index_head_dim, a.hidden_size)),
    _Row("self_attn.indexer.weights_proj.weight", lambda a: (a.index_n_heads, a.hidden_size)),
    _Row("self_attn.indexer.k_norm.weight", lambda a: (a.index_head_dim,)),
    _Row("self_attn.indexer.k_norm.bias", lambda a: (a.index_head_dim,)),
    _Row("self_attn.indexer.index_kpool_compress_gate", lambda a: (a.index_head_dim, a.hidden_size)),
    _Row("self_attn.indexer.index_kpool_compress_ape", lambda a: (a.index_kpool, a.index_head_dim)),
)
_DENSE_MLP = (
    _Row("mlp.gate_proj.weight", lambda a: (a.intermediate_size, a.hidden_size), fp8=True),
    _Row("mlp.up_proj.weight", lambda a: (a.intermediate_size, a.hidden_size), fp8=True),
    _Row("mlp.down_proj.weight", lambda a: (a.hidden_size, a.intermediate_size), fp8=True),
)
_ROUTER = (
    _Row("mlp.gate.weight", lambda a: (a.n_routed_experts, a.hidden_size)),
    _Row("mlp.gate.e_score_correction_bias", lambda a: (a.n_routed_experts,), "F32"),
)
_SHARED_EXPERTS = (
    _Row(
        "mlp.shared_experts.gate_proj.weight",
        lambda a: (a.n_shared_experts * a.moe_intermediate_size, a.hidden_size),
        fp8=True,
    ),
    _Row(
        "mlp.shared_experts.up_proj.weight",
        lambda a: (a.n_shared_experts * a.moe_intermediate_size, a.hidden_size),
        fp8=True,
    ),
    _Row(
        "mlp.shared_experts.down_proj.weight",
        lambda a: (a.hidden_size, a.n_shared_experts * a.moe_intermediate_size),
        fp8=True,
    ),
)
# Below mlp.experts.E.
_EXPERT = (
    _Row("gate_proj.weight", lambda a: (a.moe_intermediate_size, a.hidden_size), fp8=True),
    _Row("up_proj.weight", lambda a: (a.moe_intermediate_size, a.hidden_size), fp8=True),
    _Row("down_proj.weight", lambda a: (a.hidden_size, a.moe_intermediate_size), fp8=True),
)
# Only in MTP layers, which otherwise are DSA layers with experts and without hyper-connections
_MTP = (
    _Row("enorm.weight", lambda a: (a.hidden_size,)),
    _Row("hnorm.weight", lambda a: (a.hidden_size,)),
    _Row("eh_proj.weight", lambda a: (a.hidden_size, 2 * a.hidden_size)),
    _Row("shared_head.norm.weight", lambda a: (a.hidden_size,)),
)
# Below model.visual.blocks.N.; the rules take the vision tower
_VISION_BLOCK = (
    _Row("norm1.weight", lambda v: (v.hidden_size,)),
    _Row("norm2.weight", lambda v: (v.hidden_size,)),
    _Row("attn.qkv.weight", lambda v: (3 * v.hidden_size, v.hidden_size)),
    _Row("attn.qkv.bias", lambda v: (3 * v.hidden_size,)),
    _Row("attn.proj.weight", lambda v: (v.hidden_size, v.hidden_size)),
    _Row("attn.proj.bias", lambda v: (v.hidden_size,)),
    _Row("attn.q_norm.weight", lambda v: (v.hidden_size // v.num_heads,)),
    _Row("attn.k_norm.weight", lambda v: (v.hidden_size // v.num_heads,)),
    _Row("mlp.gate_proj.weight", lambda v: (v.intermediate_size, v.hidden_size)),
    _Row("mlp.gate_proj.bias", lambda v: (v.intermediate_size,)),
    _Row("mlp.up_proj.weight", lambda v: (v.intermediate_size, v.hidden_size)),
    _Row("mlp.up_proj.bias", lambda v: (v.intermediate_size,)),
    _Row("mlp.down_proj.weight", lambda v: (v.hidden_size, v.intermediate_size)),
    _Row("mlp.down_proj.bias", lambda v: (v.hidden_size,)),
)
# Below model.visual.
_VISION = (
    _Row(
        "patch_embed.proj.weight",
        lambda v: (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size),
    ),
    _Row("patch_embed.proj.bias", lambda v: (v.hidden_size,)),
    _Row("post_layernorm.weight", lambda v: (v.hidden_size,)),
    _Row(
        "downsample.weight",
        lambda v: (v.out_hidden_size, v.hidden_size, v.spatial_merge_size, v.spatial_merge_size),
    ),
    _Row("downsample.bias", lambda v: (v.out_hidden_size,)),
    _Row("merger.proj.weight", lambda v: (v.out_hidden_size, v.out_hidden_size)),
    _Row("merger.post_projection_norm.weight", lambda v: (v.out_hidden_size,)),
    _Row("merger.post_projection_norm.bias", lambda v: (v.out_hidden_size,)),
    _Row("merger.gate_proj.weight", lambda v: (v.projection_intermediate_size, v.out_hidden_size)),
    _Row("merger.up_proj.weight", lambda v: (v.projection_intermediate_size, v.out_hidden_size)),
    _Row("merger.down_proj.weight", lambda v: (v.out_hidden_size, v.projection_intermediate_size)),
)


def kinds() -> tuple[str, ...]:
    """The 92 kinds, scales of the FP8 release included, in the order of the tables."""
    sections = (
        ("", (*_EMBED_TOKENS, *_FINAL_NORM, *_LM_HEAD)),
        (LAYERS + "*.", (*_HYPER_CONNECTIONS, *_LAYER_NORMS, *_KDA, *_DSA, *_INDEXER, *_DENSE_MLP, *_ROUTER)),
        (LAYERS + "*.", (*_SHARED_EXPERTS, *_MTP)),
        (LAYERS + "*.mlp.experts.*.", _EXPERT),
        (VISION + "blocks.*.", _VISION_BLOCK),
        (VISION, _VISION),
    )
    found: dict[str, None] = {}
    for prefix, rows in sections:
        for row in rows:
            found[prefix + row.name] = None
            if row.fp8:
                found[prefix + row.name + SCALE_SUFFIX] = None
    return tuple(found)


def expected_tensors(
    architecture: Architecture, *, vision: bool = True, mtp: bool = True, fp8_block: tuple[int, int] | None = None
) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint by its released name, in the order in which a checkpoint is best written.

    Args:
        architecture: the model.
        vision: with the vision tower, if the config has one.
        mtp: with the MTP layers that the config counts; they follow the last layer in number.
        fp8_block: rows and columns of a block of the FP8 release; None gives the BF16 release.

    Returns:
        name -> :class:`TensorSpec`.
    """
    tensors: dict[str, TensorSpec] = {}

    def add(prefix: str, rows: tuple[_Row, ...], group: Group, sizes: Any = architecture) -> None:
        for row in rows:
            name, shape = prefix + row.name, row.shape(sizes)
            if row.fp8 and fp8_block is not None:
                tensors[name] = TensorSpec("F8_E4M3", shape, kind_of(name), group, fp8=True)
                scale = name + SCALE_SUFFIX
                tensors[scale] = TensorSpec("F32", scale_shape(shape, fp8_block), kind_of(scale), group)
            else:
                tensors[name] = TensorSpec(row.dtype, shape, kind_of(name), group, row.fp8)

    def add_dsa(layer: str, group: Group | None = None) -> None:
        add(layer, _DSA, group or "dsa")
        add(layer, _INDEXER, group or "indexer")

    def add_moe(layer: str, group: Group | None = None) -> None:
        add(layer, _ROUTER, group or "router")
        add(layer, _SHARED_EXPERTS, group or "shared_experts")
        for expert in range(architecture.n_routed_experts):
            add(f"{layer}mlp.experts.{expert}.", _EXPERT, group or "routed_experts")

    add("", _EMBED_TOKENS, "embed_tokens")
    schedule = zip(architecture.attention_kinds, architecture.mlp_kinds, strict=True)
    for number, (attention, mlp) in enumerate(schedule):
        layer = f"{LAYERS}{number}."
        add(layer, _HYPER_CONNECTIONS, "hyper_connections")
        add(layer, _LAYER_NORMS, "norms")
        if attention == "kda":
            add(layer, _KDA, "kda")
        else:
            add_dsa(layer)
        if mlp == "dense":
            add(layer, _DENSE_MLP, "dense_mlp")
        else:
            add_moe(layer)
    add("", _FINAL_NORM, "norms")
    add("", _LM_HEAD, "lm_head")
    for number in range(architecture.num_nextn_predict_layers if mtp else 0):
        layer = f"{LAYERS}{architecture.num_hidden_layers + number}."
        add(layer, (*_MTP, *_LAYER_NORMS), "mtp")
        add_dsa(layer, "mtp")
        add_moe(layer, "mtp")
    if vision and architecture.vision is not None:
        add(VISION, _VISION, "vision", architecture.vision)
        for block in range(architecture.vision.depth):
            add(f"{VISION}blocks.{block}.", _VISION_BLOCK, "vision", architecture.vision)
    return tensors


def kind_of(name: str) -> str:
    """The kind of a released name: its layer, block and expert numbers become ``*``."""
    return _NUMBER.sub(".*.", name)


def split_layer(name: str, prefix: str = LAYERS) -> tuple[int | None, str]:
    """Number of the layer that a name is of and the rest of the name; None and the name where it is of no layer."""
    match = _OF_LAYER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return (int(match[1]), match[2]) if match else (None, name)


def scale_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Shape of ``weight_scale_inv`` of a matrix; a ragged edge has a block of its own."""
    return tuple(math.ceil(size / side) for size, side in zip(shape, block, strict=True))
