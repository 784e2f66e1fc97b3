"""How many parameters a rank holds, from the sizes of the model alone."""

from __future__ import annotations

import dataclasses
from typing import Self

from glm5next_plugin.architecture import Architecture

from .parallel_layout import ParallelLayout


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a rank, or of a part of it; the router's expert bias is a buffer and is not counted.

    Attributes:
        dense: trained, outside the routed experts.
        experts: routed experts.
        frozen: the indexers'.
        fp32: how many of ``dense`` are fp32 whatever the model's dtype (``A_log``, ``dt_bias``, hyper-connection base
            and scale).
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0
    fp32: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.frozen

    def __add__(self, other: Self) -> ParameterCounts:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return ParameterCounts(*(a + b for a, b in zip(mine, theirs, strict=True)))


def rank_parameters(architecture: Architecture, layout: ParallelLayout, stage: int) -> ParameterCounts:
    """Parameters of every rank of a pipeline stage (they are alike)."""
    a, tp = architecture, layout.tensor
    count = ParameterCounts()
    for layer in layout.stage_layers(stage):
        count += _layer(a, layer, tp, layout.expert)
    if stage == 0:
        count += ParameterCounts(dense=a.vocab_size // tp * a.hidden_size)
    if stage == layout.pipeline - 1:
        count += ParameterCounts(dense=a.vocab_size // tp * a.hidden_size + a.hidden_size)
    return count


def unique_parameters(architecture: Architecture) -> int:
    """Parameters of the text model without MTP, each counted once; the expert bias included."""
    a = architecture
    whole = ParallelLayout(1, 1, 1, 1, 1, (a.num_hidden_layers,))
    return rank_parameters(a, whole, 0).total + len(a.moe_layers) * a.n_routed_experts


def _layer(a: Architecture, layer: int, tp: int, ep: int) -> ParameterCounts:
    count = _kda(a, tp) if a.attention_kinds[layer] == "kda" else _dsa(a, tp)
    count += _hyper_connections(a) + ParameterCounts(dense=2 * a.hidden_size)
    if a.mlp_kinds[layer] == "dense":
        return count + ParameterCounts(dense=3 * a.hidden_size * a.intermediate_size // tp)
    expert = 3 * a.hidden_size * a.moe_intermediate_size
    return count + ParameterCounts(
        dense=a.n_routed_experts * a.hidden_size + a.n_shared_experts * expert // tp,
        experts=a.n_routed_experts // ep * expert,
    )


def _kda(a: Architecture, tp: int) -> ParameterCounts:
    h, width, head = a.hidden_size, a.kda_width // tp, a.kda_head_dim
    heads = a.kda_num_heads // tp
    projections = 4 * h * width + h * heads  # q, k, v, o, beta
    low_rank = 2 * (h * head + head * width)  # decay and output gate
    convolutions = 3 * width * a.short_conv_kernel_size
    fp32 = heads + width  # A_log, dt_bias
    return ParameterCounts(dense=projections + low_rank + convolutions + fp32 + head, fp32=fp32)


def _dsa(a: Architecture, tp: int) -> ParameterCounts:
    h, heads = a.hidden_size, a.num_attention_heads // tp
    query = h * a.q_lora_rank + a.q_lora_rank + a.q_lora_rank * heads * a.qk_head_dim
    key_value = h * a.kv_lora_rank + a.kv_lora_rank + a.kv_lora_rank * heads * (a.qk_head_dim + a.v_head_dim)
    output = heads * a.v_head_dim * h
    indexer = a.index_n_heads * (a.q_lora_rank * a.index_head_dim + h)  # wq_b, weights_proj
    indexer += a.index_head_dim * (2 * h + 2 + a.index_kpool)  # wk, gate, k_norm, place embedding
    return ParameterCounts(dense=query + key_value + output, frozen=indexer)


def _hyper_connections(a: Architecture) -> ParameterCounts:
    fp32 = 2 * (a.hc_mix_width + 3)  # base, scale
    return ParameterCounts(dense=2 * a.hc_mix_width * a.hc_mult * a.hidden_size + fp32, fp32=fp32)
