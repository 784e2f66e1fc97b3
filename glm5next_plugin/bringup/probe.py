"""Where trainer and rollout engine part: intermediate results of the same tokens, compared part by part.

Each side records, for a batch ``[n, s]`` of tokens, a dictionary of these names to tensors whose leading dims are
``[n, s]``, in the order of the computation:

=============================  =====================================================================================
``embedding``                  output of the embedding
``layers.I.attn_hc``           input of the attention's norm: what the hyper-connection collapsed from the streams
``layers.I.input_norm``        output of that norm
``layers.I.indexer``           DSA only, bool ``[n, s, s]``: which keys each query attends to
``layers.I.attention``         output of KDA or DSA
``layers.I.ffn_hc``            input of the MLP's norm
``layers.I.post_norm``         output of that norm
``layers.I.router``            MoE only, bool ``[n, s, experts]``: which experts each token goes to
``layers.I.mlp``               output of the MLP or MoE
``final_norm``                 output of the last norm
``logits``                     output of ``lm_head`` (padded columns cut off)
=============================  =====================================================================================

A part is to blame when its result differs while everything before it agrees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.health.metrics import Precision

# share of tokens that may differ: a near-tie of the router or the indexer flips single tokens
_TOKEN_SHARE: dict[Precision, float] = {"fp32": 0.02, "bf16": 0.1}
# relative difference from which on a token differs
_TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 0.1}


@dataclasses.dataclass(frozen=True)
class Part:
    """One entry of the table above, in words.

    Attributes:
        name: the entry.
        title: the layer and the part, as a person calls it.
        look_at: what of the checkpoint and of the code belongs to it.
    """

    name: str
    title: str
    look_at: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How one part compares.

    Attributes:
        part: which.
        share: share of tokens that differ.
        median: median over tokens of ``|trainer - engine| / |engine|`` (of the share of differing choices for choices).
        agrees: whether that is within the noise of the precision.
    """

    part: Part
    share: float
    median: float
    agrees: bool


def parts(architecture: Architecture) -> list[Part]:
    """Every part of the model in the order of the computation."""
    found = [Part("embedding", "token embedding", "embed_tokens.weight")]
    for index, kinds in enumerate(zip(architecture.attention_kinds, architecture.mlp_kinds, strict=True)):
        found += [
            Part(f"layers.{index}.{entry}", f"layer {index}, {title}", look_at)
            for kind in ("attention input", kinds[0], "mlp input", kinds[1])
            for entry, title, look_at in _LAYER_PARTS[kind]
        ]
    return found + [
        Part("final_norm", "final RMSNorm", "norm.weight; the mean over the streams; mHC of the last layer"),
        Part("logits", "output head", "lm_head.weight; padded vocabulary columns"),
    ]


_LAYER_PARTS = {
    "attention input": (
        (
            "attn_hc",
            "mHC before the attention",
            "hc_attn_fn, _base, _scale; mixing of the streams after the last part",
        ),
        ("input_norm", "RMSNorm before the attention", "input_layernorm.weight"),
    ),
    "kda": (
        (
            "attention",
            "KDA attention",
            "A_log, dt_bias, f_a/f_b_proj (decay); b_proj (beta); q/k/v_proj, conv1d; g_a/g_b_proj, o_norm; o_proj",
        ),
    ),
    "dsa": (
        (
            "indexer",
            "DSA indexer",
            "the normalised q latent and wq_b (query); wk, k_norm, compress gate and ape (keys); weights_proj; top-k",
        ),
        (
            "attention",
            "DSA attention",
            "q_a/q_b_proj, q_a_layernorm; kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj; softmax scale; o_proj",
        ),
    ),
    "mlp input": (
        ("ffn_hc", "mHC before the MLP", "hc_ffn_fn, _base, _scale; mixing of the streams after the attention"),
        ("post_norm", "RMSNorm before the MLP", "post_attention_layernorm.weight"),
    ),
    "dense": (("mlp", "dense MLP", "the SwiGLU clamp; gate, up, down_proj"),),
    "moe": (
        ("router", "MoE router", "mlp.gate.weight and e_score_correction_bias in fp32; top-k"),
        ("mlp", "MoE experts", "the SwiGLU clamp; experts and shared_experts; the routing weight after down_proj"),
    ),
}


def compare(
    architecture: Architecture,
    trainer: Mapping[str, torch.Tensor],
    engine: Mapping[str, torch.Tensor],
    precision: Precision,
) -> list[Comparison]:
    """Compare two recordings, part by part in the order of the computation."""
    comparisons = []
    for part in parts(architecture):
        ours, theirs = trainer[part.name], engine[part.name]
        if theirs.dtype == torch.bool:
            difference = (ours != theirs).float().mean(-1)
            differs = difference > 0
        else:
            ours, theirs = ours.float(), theirs.float()
            difference = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(torch.finfo().tiny)
            differs = ~(difference <= _TOLERANCE[precision])  # NaN differs
        share = differs.float().mean().item()
        comparisons.append(Comparison(part, share, difference.median().item(), share <= _TOKEN_SHARE[precision]))
    return comparisons


def first_difference(comparisons: list[Comparison]) -> Comparison | None:
    """The first part that does not agree."""
    return next((comparison for comparison in comparisons if not comparison.agrees), None)


def selected_mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """Key positions ``[n, s, k]`` of each query, padded with -1, as a bool mask ``[n, s, keys]``."""
    positions = positions.long()
    mask = torch.zeros(*positions.shape[:-1], keys + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where(positions < 0, keys, positions), True)
    return mask[..., :keys]
