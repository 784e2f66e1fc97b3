"""What a rank needs in bytes: weights, gradients and optimizer exactly, activations as an estimate.

bf16 weights, fp32 gradients, Adam with fp32 masters whose state is split over the replicas (DistributedOptimizer).
Activations are those of one micro-batch times the micro-batches in flight (1F1B: ``pp - stage``).
"""

from __future__ import annotations

import dataclasses

from glm5next_plugin.architecture import Architecture

from .parallel_layout import ParallelLayout
from .parameters import ParameterCounts, rank_parameters

GIB = 2**30
# CUDA context, NCCL buffers, workspaces and the allocator's fragments
RESERVE = 6 * GIB
_BF16, _FP32 = 2, 4


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one pipeline stage.

    Attributes:
        stage: pipeline stage.
        parameters: of the rank.
        weights, gradients, optimizer: of the parameters.
        activations: without recompute.
        activations_recomputed: with full uniform recompute of single layers.
        reserve: what is no tensor of ours.
    """

    stage: int
    parameters: ParameterCounts
    weights: int
    gradients: int
    optimizer: int
    activations: int
    activations_recomputed: int
    reserve: int = RESERVE

    def total(self, recompute: bool) -> int:
        """All of it."""
        activations = self.activations_recomputed if recompute else self.activations
        return self.weights + self.gradients + self.optimizer + activations + self.reserve


def rank_memory(architecture: Architecture, layout: ParallelLayout, stage: int, tokens: int) -> RankMemory:
    """Memory of a rank of ``stage`` with micro-batches of ``tokens`` tokens a GPU (``max_tokens_per_gpu``).

    ``tokens`` are those that a context parallel rank holds, whole over tensor parallel ranks.
    """
    a, count = architecture, rank_parameters(architecture, layout, stage)
    masters = count.dense - count.fp32  # what is fp32 already is its own master
    optimizer = (2 * _FP32 * count.dense + _FP32 * masters) // layout.dense_replicas
    optimizer += 3 * _FP32 * count.experts // layout.expert_replicas
    in_flight = layout.pipeline - stage
    layers = [layer_activations(a, layer, layout.tensor) for layer in layout.stage_layers(stage)]
    streams = stream_bytes(a, layout.tensor)
    head = _head(a, layout.tensor) if stage == layout.pipeline - 1 else 0
    return RankMemory(
        stage=stage,
        parameters=count,
        weights=_BF16 * (count.total - count.fp32) + _FP32 * count.fp32,
        gradients=_FP32 * (count.dense + count.experts),
        optimizer=optimizer,
        activations=tokens * (in_flight * sum(layers) + head),
        # the input of every layer, and one layer at a time in full
        activations_recomputed=tokens * (in_flight * streams * len(layers) + max(layers) + head),
    )


def stream_bytes(architecture: Architecture, tp: int) -> int:
    """Bytes a token of the hidden states between layers: ``hc_mult`` streams, split by sequence parallel."""
    return _BF16 * architecture.hc_mult * architecture.hidden_size // tp


def layer_activations(architecture: Architecture, layer: int, tp: int) -> int:
    """Bytes a token that one layer keeps for its backward pass, in bf16 where no dtype is said."""
    a, h = architecture, architecture.hidden_size
    # both hyper-connections: their input streams, collapsed and normalised input, output of the block; fp32 mixes
    kept = 2 * (a.hc_mult * h + 3 * h) + 2 * _FP32 // _BF16 * a.hc_mix_width
    if a.attention_kinds[layer] == "kda":
        # q, k, v before and after the convolution, raw decay, gate, output before and after its norm; fp32 log decay
        kept += 10 * a.kda_width + _FP32 // _BF16 * (a.kda_width + a.kda_num_heads) + 2 * a.kda_head_dim * tp
    else:
        # query and output of the heads, both latents before and after their norms, fp32 denominators, int32 pools
        kept += a.num_attention_heads * (a.qk_head_dim + a.v_head_dim) + 2 * a.q_lora_rank
        kept += a.kv_lora_rank * (1 + tp) + _FP32 // _BF16 * (a.num_attention_heads + a.index_pools * tp)
    if a.mlp_kinds[layer] == "dense":
        kept += 3 * a.intermediate_size
    else:
        # permuted input and output, gate and up, their product, a token and expert; fp32 logits and weights
        kept += a.num_experts_per_tok * (2 * h + 3 * a.moe_intermediate_size)
        kept += 3 * a.n_shared_experts * a.moe_intermediate_size + 2 * _FP32 // _BF16 * a.n_routed_experts
    return _BF16 * kept // tp


def _head(a: Architecture, tp: int) -> int:
    """Bytes a token of the logits: bf16, their fp32 copy and its gradient."""
    return (_BF16 + 2 * _FP32) * a.vocab_size // tp
