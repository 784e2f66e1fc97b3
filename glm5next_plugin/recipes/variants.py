"""Models of the family by name: the release, and small ones for a CPU with every part of it.

Each function returns a validated :class:`Architecture` whose ``raw`` is a full config in the released spelling. Keyword
arguments override: the schedule (``num_hidden_layers``, ``dsa_layers``, ``first_k_dense_replace``), any key of
``text_config`` by its released name, and ``linear_attn_config=`` and ``vision_config=`` with the keys to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

# Special tokens of the release, which are the last of its vocabulary in a small one
SPECIAL_TOKENS = {
    "<|endoftext|>": 154820,
    "<|user|>": 154827,
    "<|observation|>": 154829,
    "<|begin_of_image|>": 154830,
    "<|end_of_image|>": 154831,
    "<|begin_of_video|>": 154832,
    "<|end_of_video|>": 154833,
    "<|image|>": 154854,
    "<|video|>": 154855,
}
_RELEASED_VOCAB_SIZE = 154880


def full(**overrides: Any) -> Architecture:
    """The released model: 45 layers, 288 experts."""
    text = dict(
        vocab_size=_RELEASED_VOCAB_SIZE,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=2048,
        num_attention_heads=64,
        qk_head_dim=256,
        v_head_dim=256,
        q_lora_rank=1536,
        kv_lora_rank=512,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        index_kpool=4,
        n_routed_experts=288,
        num_experts_per_tok=8,
        max_position_embeddings=1048576,
        initializer_range=0.02,
    )
    vision = dict(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        image_size=448,
        patch_size=14,
        out_hidden_size=4096,
        projection_intermediate_size=10240,
    )
    return _build(dict(num_hidden_layers=45), text, dict(num_heads=64, head_dim=128), vision, overrides)


def tiny(**overrides: Any) -> Architecture:
    """8 layers, DSA at 3 and 7, three of them dense; a query sees all of up to 19 keys."""
    text = dict(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_attention_heads=4,
        qk_head_dim=64,
        v_head_dim=64,
        q_lora_rank=96,
        kv_lora_rank=64,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        index_kpool=4,
        n_routed_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
        initializer_range=0.05,
    )
    return _build(dict(num_hidden_layers=8), text, dict(num_heads=4, head_dim=64), _small_vision(256), overrides)


def demo(**overrides: Any) -> Architecture:
    """4 layers, DSA last, one dense: small enough to learn a task in minutes on two cores."""
    text = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_attention_heads=2,
        qk_head_dim=32,
        v_head_dim=32,
        q_lora_rank=32,
        kv_lora_rank=32,
        index_n_heads=16,  # with few heads two pools often tie at a score of exactly 0
        index_head_dim=16,
        index_topk=16,
        index_kpool=4,
        n_routed_experts=8,
        num_experts_per_tok=4,
        routed_scaling_factor=1.0,  # a router's near-tie that flips moves log-probabilities little
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    schedule = dict(num_hidden_layers=4, first_k_dense_replace=1)
    return _build(schedule, text, dict(num_heads=2, head_dim=16), _small_vision(64), overrides)


VARIANTS: dict[str, Callable[..., Architecture]] = {"full": full, "tiny": tiny, "demo": demo}


def variant(name: str, **overrides: Any) -> Architecture:
    """A variant by name.

    Raises:
        InputError: no such variant.
    """
    if name not in VARIANTS:
        raise InputError(f"no variant {name!r}; there are {', '.join(sorted(VARIANTS))}")
    return VARIANTS[name](**overrides)


def special_token_ids(vocab_size: int) -> dict[str, int]:
    """Ids of the special tokens: those of the release, or the last ones of a smaller vocabulary.

    Raises:
        InputError: the vocabulary has no room for them and one more token.
    """
    if vocab_size >= _RELEASED_VOCAB_SIZE:
        return dict(SPECIAL_TOKENS)
    first = vocab_size - len(SPECIAL_TOKENS)
    if first < 1:
        raise InputError(f"vocab_size {vocab_size}: needed: more than the {len(SPECIAL_TOKENS)} special tokens")
    return {token: first + i for i, token in enumerate(SPECIAL_TOKENS)}


def _small_vision(out_hidden_size: int) -> dict[str, Any]:
    return dict(
        depth=1,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        image_size=28,
        patch_size=14,
        out_hidden_size=out_hidden_size,
        projection_intermediate_size=48,
    )


def _build(
    schedule: dict[str, Any],
    text: dict[str, Any],
    linear: dict[str, Any],
    vision: dict[str, Any],
    overrides: dict[str, Any],
) -> Architecture:
    overrides = dict(overrides)
    schedule = {key: overrides.pop(key, schedule.get(key)) for key in _SCHEDULE}
    linear = linear | dict(short_conv_kernel_size=4, gate_lower_bound=-5.0)
    vision = _VISION_COMMON | vision
    _override("linear_attn_config", linear, overrides.pop("linear_attn_config", {}))
    _override("vision_config", vision, overrides.pop("vision_config", {}))
    text = _TEXT_COMMON | text
    _override("text_config", text, overrides)

    layers = schedule["num_hidden_layers"]
    dsa = _default(schedule["dsa_layers"], [i for i in range(layers) if i % 4 == 3])
    dense = _default(schedule["first_k_dense_replace"], min(3, layers))
    tokens = special_token_ids(text["vocab_size"])
    stops = [tokens["<|endoftext|>"], tokens["<|user|>"], tokens["<|observation|>"]]
    return Architecture.from_config(
        {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "image_token_id": tokens["<|image|>"],
            "video_token_id": tokens["<|video|>"],
            "image_start_token_id": tokens["<|begin_of_image|>"],
            "image_end_token_id": tokens["<|end_of_image|>"],
            "video_start_token_id": tokens["<|begin_of_video|>"],
            "video_end_token_id": tokens["<|end_of_video|>"],
            "text_config": text
            | {
                "model_type": "glm5_next_text",
                "num_hidden_layers": layers,
                "first_k_dense_replace": dense,
                "layer_types": ["deepseek_sparse_attention" if i in dsa else "linear_attention" for i in range(layers)],
                "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)],
                "indexer_types": ["full"] * layers,
                "num_key_value_heads": text["num_attention_heads"],
                "qk_nope_head_dim": text["qk_head_dim"],
                "linear_attn_config": linear
                | {
                    "kda_layers": [i for i in range(layers) if i not in dsa],
                    "full_attn_layers": [i for i in range(layers) if i in dsa],
                },
                "eos_token_id": stops,
                "pad_token_id": tokens["<|endoftext|>"],
                "bos_token_id": None,
                "dtype": "bfloat16",
            },
            "vision_config": vision,
        }
    )


_SCHEDULE = ("num_hidden_layers", "dsa_layers", "first_k_dense_replace")

# What the release has; a variant states what it changes
_TEXT_COMMON = dict(
    head_dim=0,
    qk_rope_head_dim=0,
    mla_use_nope=True,
    attention_bias=False,
    attention_dropout=0.0,
    hidden_act="silu",
    moe_layer_freq=1,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    moe_router_dtype="float32",
    mhc=True,
    hc_mult=4,
    hc_eps=1e-6,
    hc_sinkhorn_iters=20,
    index_kpool_compress=True,
    index_kpool_always_select_tail=True,
    index_topk_freq=1,
    indexer_rope_interleave=True,
    swiglu_limit=10.0,
    num_nextn_predict_layers=1,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 800000, "rope_type": "default"},
    tie_word_embeddings=False,
    use_cache=True,
)
_VISION_COMMON = dict(
    model_type="glm5_next_vision",
    hidden_act="silu",
    in_channels=3,
    temporal_patch_size=2,
    spatial_merge_size=2,
    attention_bias=True,
    attention_dropout=0.0,
    swiglu_limit=10.0,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
)


def _override(where: str, config: dict[str, Any], overrides: dict[str, Any]) -> None:
    unknown = sorted(overrides.keys() - config.keys())
    if unknown:
        raise InputError(f"no such key in {where}: {', '.join(unknown)}; there are {', '.join(sorted(config))}")
    config.update(overrides)


def _default(value: Sequence[int] | int | None, default: Any) -> Any:
    return default if value is None else value
