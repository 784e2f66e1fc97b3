"""Every number of a ``glm5_next`` model and its layer schedule, read from a config and validated.

Three spellings of the config exist and all are accepted:

* **released**: ``text_config`` with ``linear_attn_config``, ``kda_layers`` (0-based) and ``first_k_dense_replace``;
* **transformers**: what ``Glm5NextConfig.to_dict()`` gives (``linear_num_heads``, ``indexed_attention``, ...);
* **text-only**: either of the two without the ``text_config`` level.

What a config leaves open and frameworks fill in differently (SGLang and transformers disagree on six defaults) is an
error here, not a guess.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .json_text import read_json

AttentionKind = Literal["kda", "dsa"]
MlpKind = Literal["dense", "moe"]

_ATTENTION_SPELLINGS: dict[str, AttentionKind] = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "dsa",
    "indexed_attention": "dsa",
    "full_attention": "dsa",
}
_MLP_SPELLINGS: dict[str, MlpKind] = {"dense": "dense", "sparse": "moe"}
_MODEL_TYPES = ("glm5_next", "glm5_next_text")

# Far beyond any model of this family; a number that a damaged file makes up must not become lists of that length
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
_MAX_EXPERT_MODULES = 2**18  # of all layers


class ConfigError(ValueError):
    """A config that cannot be this model, or that frameworks would read in different ways.

    Attributes:
        field: the config key at fault, dotted below ``text_config`` (``linear_attn_config.kda_layers``).
    """

    def __init__(self, field: str, found: Any, needed: str):
        self.field = field
        super().__init__(f"config field {field!r}: found {found!r}; needed: {needed}")


@dataclasses.dataclass(frozen=True)
class VisionArchitecture:
    """The vision tower, as far as its tensors' shapes depend on it. It is carried over, never trained here."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    in_channels: int = 3

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VisionArchitecture:
        """Read ``vision_config``; every size must be stated, since class defaults differ between releases."""
        aliases = {"num_heads": ("num_heads", "num_attention_heads"), "depth": ("depth", "num_hidden_layers")}
        values = {}
        for field in dataclasses.fields(cls):
            for name in aliases.get(field.name, (field.name,)):
                if name in config:
                    value = config[name]
                    if isinstance(value, Sequence) and len(value) > 0 and all(one == value[0] for one in value):
                        value = value[0]
                    values[field.name] = _positive(f"vision_config.{name}", value)
                    break
            else:
                if field.default is dataclasses.MISSING:
                    raise ConfigError(f"vision_config.{field.name}", None, "a positive integer")
        vision = cls(**values)
        _count("vision_config.depth", vision.depth, MAX_LAYERS)
        if vision.hidden_size % vision.num_heads:
            raise ConfigError("vision_config.num_heads", vision.num_heads, f"a divisor of {vision.hidden_size}")
        if config.get("attention_bias", True) is not True:
            raise ConfigError("vision_config.attention_bias", config["attention_bias"], "true: the blocks have biases")
        return vision


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes of a ``glm5_next`` text model. Layer lists have one entry a layer, layer 0 first.

    Build it with :meth:`from_config` or :meth:`from_pretrained`; both validate. ``raw`` keeps the root config as it was
    found, so that what is no number of the text model (token ids, vision, quantisation) survives a round trip.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    # schedule
    attention_kinds: tuple[AttentionKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    # DSA: NoPE MLA with a pooled indexer
    num_attention_heads: int
    qk_head_dim: int
    v_head_dim: int
    q_lora_rank: int
    kv_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    # MoE
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    # hyper-connections
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    # of the checkpoint, not of the trained model
    num_nextn_predict_layers: int
    max_position_embeddings: int
    initializer_range: float
    vision: VisionArchitecture | None = None
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    # ------------------------------------------------------------------ derived
    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind == "kda")

    @property
    def dsa_layers(self) -> tuple[int, ...]:
        """0-based indices of the DSA layers."""
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind == "dsa")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers with routed experts."""
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "moe")

    @property
    def kda_width(self) -> int:
        """Width of q, k and v of a KDA layer, all heads together."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def index_pools(self) -> int:
        """How many finished pools a query selects at most."""
        return self.index_topk // self.index_kpool

    @property
    def selection_width(self) -> int:
        """Most keys that one query attends to: the selected pools and the unfinished tail."""
        return self.index_topk + self.index_kpool - 1

    @property
    def hc_mix_width(self) -> int:
        """Rows of ``hc_*_fn``: pre, post and the stream-to-stream matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention logits of DSA (no yarn factor: NoPE)."""
        return self.qk_head_dim**-0.5

    # ------------------------------------------------------------------ construction
    @classmethod
    def from_pretrained(cls, path: str | Path) -> Architecture:
        """Read ``config.json`` of a checkpoint directory (or the file itself).

        Raises:
            FileNotFoundError: no such file.
            ConfigError: the file is not JSON or not this model.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; a checkpoint directory holds a config.json")
        try:
            config = read_json(file)
        except ValueError as error:
            raise ConfigError("config.json", str(error), f"{file} to hold a JSON object") from error
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: Any, *, mtp_layers: int = 0) -> Architecture:
        """Build from a mapping or from any object with ``to_dict()``.

        Args:
            config: root config, or the text config alone, in any of the three spellings.
            mtp_layers: MTP layers that the caller wants to train; only 0 is possible. The release's
                ``num_nextn_predict_layers`` of 1 describes the file and is no wish.

        Raises:
            ConfigError: names the field, what was found and what is needed.
        """
        if mtp_layers:
            raise ConfigError("mtp_layers", mtp_layers, "0: the MTP layer has no hyper-connections and is not trained")
        root = config.to_dict() if hasattr(config, "to_dict") else config
        if not isinstance(root, Mapping):
            raise ConfigError("config", type(config).__name__, "a mapping or an object with to_dict()")
        root = {key: value.to_dict() if hasattr(value, "to_dict") else value for key, value in root.items()}
        text, vision = root.get("text_config") or root, root.get("vision_config")
        for field, level in (("text_config", text), ("vision_config", vision or {})):
            if not isinstance(level, Mapping):
                raise ConfigError(field, level, "a mapping")
        for holder in (root, text):
            if "model_type" in holder and holder["model_type"] not in _MODEL_TYPES:
                raise ConfigError("model_type", holder["model_type"], f"one of {list(_MODEL_TYPES)}")
        if "model_type" not in root and "model_type" not in text:
            raise ConfigError("model_type", None, f"one of {list(_MODEL_TYPES)}")
        if root.get("tie_word_embeddings") or text.get("tie_word_embeddings"):
            raise ConfigError("tie_word_embeddings", True, "false: lm_head is a tensor of its own")
        return cls(**_read_text(text), vision=VisionArchitecture.from_config(vision) if vision else None, raw=root)

    # ------------------------------------------------------------------ writing
    def released_config(self) -> dict[str, Any]:
        """The config in the full released spelling, text level included.

        Every key on which SGLang or transformers has a default of its own is written, so that each framework builds the
        same model from the file. Keys of the source that are no number of the text model are kept.
        """
        raw = copy.deepcopy(dict(self.raw))
        nested = bool(raw.get("text_config"))
        source_text = raw["text_config"] if nested else raw
        text = {k: v for k, v in source_text.items() if k not in _TRANSFORMERS_ONLY | _INDEXER_SCHEDULES | _ROOT_ONLY}
        text.update(
            model_type="glm5_next_text",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            moe_intermediate_size=self.moe_intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            rms_norm_eps=self.rms_norm_eps,
            hidden_act="silu",
            attention_bias=False,
            layer_types=[
                "linear_attention" if kind == "kda" else "deepseek_sparse_attention" for kind in self.attention_kinds
            ],
            mlp_layer_types=["dense" if kind == "dense" else "sparse" for kind in self.mlp_kinds],
            moe_layer_freq=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            head_dim=0,
            qk_head_dim=self.qk_head_dim,
            qk_nope_head_dim=self.qk_head_dim,
            qk_rope_head_dim=0,
            v_head_dim=self.v_head_dim,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            mla_use_nope=True,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
            index_topk=self.index_topk,
            index_kpool=self.index_kpool,
            index_kpool_compress=True,
            index_kpool_always_select_tail=True,
            indexer_types=["full"] * self.num_hidden_layers,
            index_topk_freq=1,
            linear_attn_config={
                "num_heads": self.kda_num_heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": self.short_conv_kernel_size,
                "gate_lower_bound": self.gate_lower_bound,
                "kda_layers": list(self.kda_layers),
                "full_attn_layers": list(self.dsa_layers),
            },
            n_routed_experts=self.n_routed_experts,
            n_shared_experts=self.n_shared_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            n_group=1,
            topk_group=1,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            norm_topk_prob=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
            moe_router_dtype="float32",
            swiglu_limit=self.swiglu_limit,
            mhc=True,
            hc_mult=self.hc_mult,
            hc_eps=self.hc_eps,
            hc_sinkhorn_iters=self.hc_sinkhorn_iters,
            num_nextn_predict_layers=self.num_nextn_predict_layers,
            max_position_embeddings=self.max_position_embeddings,
            initializer_range=self.initializer_range,
            tie_word_embeddings=False,
        )
        if self.gate_lower_bound is None:
            text["linear_attn_config"]["safe_gate"] = False
        leading_dense = _leading_dense(self.mlp_kinds)
        if leading_dense is None:
            text.pop("first_k_dense_replace", None)
        else:
            text["first_k_dense_replace"] = leading_dense
        root = {k: v for k, v in raw.items() if k != "text_config" and (nested or k in _ROOT_ONLY)}
        root.update(
            architectures=["Glm5NextForConditionalGeneration"],
            model_type="glm5_next",
            tie_word_embeddings=False,
            text_config=text,
        )
        return root


_TRANSFORMERS_ONLY = frozenset(
    {"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "linear_lower_bound", "output_router_logits"}
)
# Other ways to say which indexers are full; indexer_types says it in what we write
_INDEXER_SCHEDULES = frozenset({"index_topk_pattern", "index_skip_topk_offset"})
_ROOT_ONLY = frozenset(
    {
        "architectures",
        "transformers_version",
        "quantization_config",
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
        "vision_config",
    }
)


def _positive(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(field, value, "a positive integer")
    return value


def _count(field: str, value: Any, limit: int) -> int:
    if _positive(field, value) > limit:
        raise ConfigError(field, value, f"at most {limit}")
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(field, value, "a number")
    return float(value)


def _positive_number(field: str, value: Any) -> float:
    if _number(field, value) <= 0:
        raise ConfigError(field, value, "a positive number")
    return float(value)


def _must_be(text: Mapping[str, Any], field: str, allowed: Sequence[Any], why: str) -> None:
    """A key that may be absent, but if present must have one of the values that this model has."""
    if field in text and text[field] not in allowed:
        raise ConfigError(field, text[field], f"{allowed[0]!r} ({why})")


def _read_text(text: Mapping[str, Any]) -> dict[str, Any]:
    def size(field: str) -> int:
        return _positive(field, text.get(field))

    _must_be(text, "hidden_act", ("silu", "swish"), "the MLPs are clamped SwiGLU")
    _must_be(text, "attention_bias", (False, None), "no projection has a bias")
    _must_be(text, "qk_rope_head_dim", (0, None), "DSA is NoPE")
    _must_be(text, "mla_use_nope", (True,), "DSA is NoPE")
    _must_be(text, "scoring_func", ("sigmoid",), "the router scores with a sigmoid")
    _must_be(text, "topk_method", ("noaux_tc",), "experts are chosen by score plus e_score_correction_bias")
    _must_be(text, "n_group", (1,), "experts are not grouped")
    _must_be(text, "topk_group", (1,), "experts are not grouped")
    _must_be(text, "moe_layer_freq", (1,), "mlp_layer_types says which layers are MoE")
    _must_be(text, "moe_router_dtype", ("float32", "fp32"), "biases near 7 need fp32 router logits")
    _must_be(text, "mhc", (True,), "without hyper-connections this is another model")
    _must_be(text, "index_kpool_compress", (True,), "pooled keys are a learned weighted sum")
    _must_be(text, "index_kpool_always_select_tail", (True,), "the unfinished pool is always attended to")

    layers = _count("num_hidden_layers", text.get("num_hidden_layers"), MAX_LAYERS)
    heads = size("num_attention_heads")
    if text.get("num_key_value_heads", heads) not in (heads, None):
        raise ConfigError("num_key_value_heads", text["num_key_value_heads"], f"num_attention_heads ({heads})")
    if text.get("q_lora_rank") is None:
        raise ConfigError("q_lora_rank", None, "a positive integer: the indexer reads the query latent")
    qk_head_dim = size("qk_nope_head_dim") if "qk_nope_head_dim" in text else size("qk_head_dim")
    if text.get("qk_head_dim", qk_head_dim) != qk_head_dim:
        raise ConfigError("qk_head_dim", text["qk_head_dim"], f"qk_nope_head_dim ({qk_head_dim}): DSA is NoPE")

    if text.get("index_kpool") is None:
        raise ConfigError("index_kpool", None, "a value: the release has 4, the class default of transformers is 16")
    kpool, topk = size("index_kpool"), size("index_topk")
    if topk % kpool:
        raise ConfigError("index_topk", topk, f"a multiple of index_kpool ({kpool})")

    nextn = text.get("num_nextn_predict_layers") or 0
    if nextn:
        _count("num_nextn_predict_layers", nextn, MAX_LAYERS)
    experts = _count("n_routed_experts", text.get("n_routed_experts"), MAX_EXPERTS)
    if experts * (layers + nextn) > _MAX_EXPERT_MODULES:
        needed = f"at most {_MAX_EXPERT_MODULES} experts in all {layers + nextn} layers"
        raise ConfigError("n_routed_experts", experts, needed)
    per_token = size("num_experts_per_tok")
    if per_token > experts:
        raise ConfigError("num_experts_per_tok", per_token, f"at most n_routed_experts ({experts})")
    norm_topk_prob = text.get("norm_topk_prob", True)
    if not isinstance(norm_topk_prob, bool):
        raise ConfigError("norm_topk_prob", norm_topk_prob, "true or false")
    attention_kinds = _attention_kinds(text, layers)
    _check_indexers(text, attention_kinds)
    return dict(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        moe_intermediate_size=size("moe_intermediate_size"),
        num_hidden_layers=layers,
        rms_norm_eps=_positive_number("rms_norm_eps", text.get("rms_norm_eps")),
        attention_kinds=attention_kinds,
        mlp_kinds=_mlp_kinds(text, layers),
        num_attention_heads=heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=size("v_head_dim"),
        q_lora_rank=size("q_lora_rank"),
        kv_lora_rank=size("kv_lora_rank"),
        index_n_heads=size("index_n_heads"),
        index_head_dim=size("index_head_dim"),
        index_topk=topk,
        index_kpool=kpool,
        **_linear_attention(text),
        n_routed_experts=experts,
        n_shared_experts=size("n_shared_experts"),
        num_experts_per_tok=per_token,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=_positive_number("routed_scaling_factor", text.get("routed_scaling_factor")),
        swiglu_limit=_positive_number("swiglu_limit", text.get("swiglu_limit")),
        hc_mult=size("hc_mult"),
        hc_eps=_positive_number("hc_eps", text.get("hc_eps")),
        hc_sinkhorn_iters=size("hc_sinkhorn_iters"),
        num_nextn_predict_layers=nextn,
        max_position_embeddings=_positive("max_position_embeddings", text.get("max_position_embeddings", 1048576)),
        initializer_range=_number("initializer_range", text.get("initializer_range", 0.02)),
    )


def _attention_kinds(text: Mapping[str, Any], layers: int) -> tuple[AttentionKind, ...]:
    """transformers decides by layer_types, SGLang by kda_layers: one is enough, both must agree."""
    linear = _linear_config(text)
    from_types = from_kda = None
    if text.get("layer_types") is not None:
        types = _full_length(text, "layer_types", layers)
        _only("layer_types", types, _ATTENTION_SPELLINGS)
        from_types = tuple(_ATTENTION_SPELLINGS[kind] for kind in types)
    if linear.get("kda_layers") is not None:
        kda = _layer_numbers("kda_layers", linear["kda_layers"], layers)
        from_kda = tuple("kda" if i in kda else "dsa" for i in range(layers))
        full = linear.get("full_attn_layers")
        if full is not None and _layer_numbers("full_attn_layers", full, layers) != set(range(layers)) - kda:
            raise ConfigError("linear_attn_config.full_attn_layers", full, "exactly the layers not in kda_layers")
    if from_types is None and from_kda is None:
        raise ConfigError("layer_types", None, "layer_types or linear_attn_config.kda_layers")
    if from_types and from_kda and from_types != from_kda:
        differ = [i for i in range(layers) if from_types[i] != from_kda[i]]
        needed = f"agreement with layer_types (layers {differ} differ)"
        raise ConfigError("linear_attn_config.kda_layers", linear["kda_layers"], needed)
    return from_types or from_kda


def _mlp_kinds(text: Mapping[str, Any], layers: int) -> tuple[MlpKind, ...]:
    """transformers ignores first_k_dense_replace: if mlp_layer_types is there too, they must agree."""
    leading = text.get("first_k_dense_replace")
    if leading is not None and (isinstance(leading, bool) or not isinstance(leading, int) or leading < 0):
        raise ConfigError("first_k_dense_replace", leading, "an integer of at least 0")
    if text.get("mlp_layer_types") is None:
        if leading is None:
            raise ConfigError("mlp_layer_types", None, "mlp_layer_types or first_k_dense_replace")
        return tuple("dense" if i < leading else "moe" for i in range(layers))
    types = _full_length(text, "mlp_layer_types", layers)
    _only("mlp_layer_types", types, _MLP_SPELLINGS)
    kinds = tuple(_MLP_SPELLINGS[kind] for kind in types)
    if leading is not None and kinds != tuple("dense" if i < leading else "moe" for i in range(layers)):
        raise ConfigError("first_k_dense_replace", leading, f"agreement with mlp_layer_types {list(types)}")
    return kinds


def _check_indexers(text: Mapping[str, Any], attention_kinds: tuple[AttentionKind, ...]) -> None:
    """Only "full" indexers exist in a release; the schedule keys must not say otherwise on a DSA layer."""
    layers = len(attention_kinds)
    if text.get("indexer_types") is not None:
        field, types = "indexer_types", _full_length(text, "indexer_types", layers)
        _only(field, types, ("full", "shared"))
    elif text.get("index_topk_pattern") is not None:
        field = "index_topk_pattern"
        pattern = _full_length(text, field, layers)
        _only(field, pattern, ("F", "S", "full", "shared"))
        types = [{"F": "full", "S": "shared"}.get(entry, entry) for entry in pattern]
    else:
        field = "index_topk_freq"
        freq, offset = _positive(field, text.get(field, 1)), text.get("index_skip_topk_offset", 2)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ConfigError("index_skip_topk_offset", offset, "an integer")
        types = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]
    shared = [i for i in range(layers) if attention_kinds[i] == "dsa" and types[i] != "full"]
    if shared:
        raise ConfigError(field, text.get(field), f"a full indexer on every DSA layer (layers {shared} are shared)")


def _linear_attention(text: Mapping[str, Any]) -> dict[str, Any]:
    """KDA sizes from ``linear_attn_config`` or from the flat names of transformers."""
    nested = _linear_config(text)
    found: dict[str, Any] = {
        "kda_num_heads": _positive(*_either(text, nested, "num_heads", "linear_num_heads")),
        "kda_head_dim": _positive(*_either(text, nested, "head_dim", "linear_head_dim")),
        "short_conv_kernel_size": _positive(*_either(text, nested, "short_conv_kernel_size", "linear_conv_kernel_dim")),
    }
    field, bound = _either(text, nested, "gate_lower_bound", "linear_lower_bound")
    # transformers reads an absent or true safe_gate as -5.0
    if bound is None and nested and nested.get("safe_gate", True):
        raise ConfigError(field, None, "a negative number (-5.0 in the release), or safe_gate false as well")
    if bound is not None and _number(field, bound) >= 0:
        raise ConfigError(field, bound, "a negative number: it scales a log decay")
    found["gate_lower_bound"] = None if bound is None else float(bound)
    return found


def _either(text: Mapping[str, Any], nested: Mapping[str, Any], inner: str, flat: str) -> tuple[str, Any]:
    """Key and value of a setting that stands in ``linear_attn_config`` or flat; both must agree."""
    key = f"linear_attn_config.{inner}"
    if inner not in nested and flat not in text:
        raise ConfigError(key, None, f"a value here or as {flat}: the defaults of frameworks differ")
    if inner not in nested:
        return flat, text[flat]
    if flat in text and text[flat] != nested[inner]:
        raise ConfigError(key, nested[inner], f"the value of {flat} ({text[flat]!r})")
    return key, nested[inner]


def _linear_config(text: Mapping[str, Any]) -> Mapping[str, Any]:
    linear = text.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ConfigError("linear_attn_config", linear, "a mapping")
    return linear


def _layer_numbers(key: str, numbers: Any, layers: int) -> set[int]:
    field, needed = f"linear_attn_config.{key}", f"distinct 0-based layers below {layers}"
    if not isinstance(numbers, Sequence) or any(type(i) is not int or not 0 <= i < layers for i in numbers):
        raise ConfigError(field, numbers, needed)
    if len(set(numbers)) != len(numbers):
        raise ConfigError(field, numbers, needed)
    return set(numbers)


def _only(field: str, values: Sequence[Any], allowed: Iterable[str]) -> None:
    unknown = [value for value in values if value not in list(allowed)]
    if unknown:
        raise ConfigError(field, unknown, f"values among {sorted(allowed)}")


def _full_length(text: Mapping[str, Any], field: str, layers: int) -> Sequence[Any]:
    values = text[field]
    if not isinstance(values, Sequence) or len(values) != layers:
        raise ConfigError(field, values, f"{layers} entries (num_hidden_layers)")
    return values


def _leading_dense(kinds: tuple[MlpKind, ...]) -> int | None:
    """first_k_dense_replace, or None where dense layers do not come first."""
    count = kinds.index("moe") if "moe" in kinds else len(kinds)
    return count if "dense" not in kinds[count:] else None
