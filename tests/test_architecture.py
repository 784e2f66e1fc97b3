"""The config in its three spellings, and every trap of it as an error that names the field."""

import copy
import json

import pytest

from glm5next_plugin.architecture import Architecture, ConfigError
from glm5next_plugin.recipes.variants import demo, full, tiny

DSA_LAYERS = [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43]
KDA_LAYERS = [
    0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22,
    24, 25, 26, 28, 29, 30, 32, 33, 34, 36, 37, 38, 40, 41, 42, 44,
]  # fmt: skip

# config.json of the FP8 release
RELEASED = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "tie_word_embeddings": False,
    "image_token_id": 154854,
    "video_token_id": 154855,
    "image_start_token_id": 154830,
    "image_end_token_id": 154831,
    "video_start_token_id": 154832,
    "video_end_token_id": 154833,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj"],
    },
    "text_config": {
        "model_type": "glm5_next_text",
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 0,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "mla_use_nope": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["deepseek_sparse_attention" if i in DSA_LAYERS else "linear_attention" for i in range(45)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": KDA_LAYERS,
            "full_attn_layers": DSA_LAYERS,
        },
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_dtype": "float32",
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * 45,
        "index_topk_freq": 1,
        "indexer_rope_interleave": True,
        "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 800000, "rope_type": "default"},
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
        "bos_token_id": None,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 4096,
        "projection_intermediate_size": 10240,
        "attention_bias": True,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
    },
}

# What save_pretrained of transformers 5.17 keeps when the config was made from its own arguments
TRANSFORMERS_ONLY = {
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "layer_types": ["indexed_attention" if i in DSA_LAYERS else "linear_attention" for i in range(45)],
}
ABSENT_FROM_TRANSFORMERS = (
    "linear_attn_config",
    "mhc",
    "index_kpool_compress",
    "mla_use_nope",
    "first_k_dense_replace",
    "moe_layer_freq",
    "scoring_func",
    "topk_method",
    "moe_router_dtype",
    "index_topk_freq",
)


def released() -> dict:
    return copy.deepcopy(RELEASED)


def in_transformers_spelling() -> dict:
    config = released()
    text = config["text_config"]
    for key in ABSENT_FROM_TRANSFORMERS:
        del text[key]
    text.update(copy.deepcopy(TRANSFORMERS_ONLY))
    return config


def changed(**text: object) -> dict:
    """The released config with keys of text_config replaced; ``...`` deletes the key."""
    config = released()
    for key, value in text.items():
        holder = config["text_config"]
        if "__" in key:
            level, key = key.split("__")
            holder = holder[level]
        if value is ...:
            del holder[key]
        else:
            holder[key] = value
    return config


def test_released_config_gives_the_numbers_of_the_release():
    architecture = Architecture.from_config(RELEASED)
    assert architecture.kda_layers == tuple(KDA_LAYERS) and len(architecture.kda_layers) == 34
    assert architecture.dsa_layers == tuple(DSA_LAYERS) and len(architecture.dsa_layers) == 11
    assert architecture.moe_layers == tuple(range(3, 45))
    assert architecture.kda_width == 8192
    assert architecture.index_pools == 512
    assert architecture.selection_width == 2051
    assert architecture.hc_mix_width == 24
    assert architecture.softmax_scale == 1 / 16
    assert architecture.gate_lower_bound == -5.0
    assert architecture.swiglu_limit == 10.0
    assert architecture.num_nextn_predict_layers == 1
    assert (architecture.vision.depth, architecture.vision.projection_intermediate_size) == (24, 10240)


def test_variant_full_is_the_release():
    assert full() == Architecture.from_config(RELEASED)
    written, expected = full().released_config(), released()
    del expected["quantization_config"]
    for key, value in expected["text_config"].items():
        assert written["text_config"][key] == value, key
    for key in expected.keys() - {"text_config", "vision_config"}:
        assert written[key] == expected[key], key
    assert expected["vision_config"].items() <= written["vision_config"].items()


def test_transformers_spelling_gives_the_same_architecture():
    assert Architecture.from_config(in_transformers_spelling()) == Architecture.from_config(RELEASED)


@pytest.mark.parametrize("spelled", [released, in_transformers_spelling])
def test_text_only_spelling_gives_the_same_text_model(spelled):
    config = spelled()
    text_only = Architecture.from_config(config["text_config"])
    with_vision = Architecture.from_config(config["text_config"] | {"vision_config": config["vision_config"]})
    assert text_only.vision is None
    assert with_vision == Architecture.from_config(RELEASED)


@pytest.mark.parametrize("alias", ["deepseek_sparse_attention", "indexed_attention", "full_attention"])
def test_three_words_name_sparse_attention(alias):
    types = [alias if i in DSA_LAYERS else "linear_attention" for i in range(45)]
    assert Architecture.from_config(changed(layer_types=types)).dsa_layers == tuple(DSA_LAYERS)


def test_either_of_layer_types_and_kda_layers_is_enough():
    by_numbers = changed(layer_types=...)
    by_types = changed(linear_attn_config__kda_layers=..., linear_attn_config__full_attn_layers=...)
    assert Architecture.from_config(by_numbers) == Architecture.from_config(by_types) == full()


def test_either_of_mlp_layer_types_and_first_k_dense_replace_is_enough():
    assert Architecture.from_config(changed(mlp_layer_types=...)) == full()
    assert Architecture.from_config(changed(first_k_dense_replace=...)) == full()


def test_config_object_of_transformers_gives_the_same_architecture():
    from transformers import Glm5NextConfig

    assert Architecture.from_config(Glm5NextConfig(**released())) == full()
    assert Architecture.from_config(Glm5NextConfig(**in_transformers_spelling())) == full()
    text = Glm5NextConfig(**released()).text_config
    assert Architecture.from_config(text).kda_layers == tuple(KDA_LAYERS)
    assert Architecture.from_config({"model_type": "glm5_next", "text_config": text}).kda_layers == tuple(KDA_LAYERS)


@pytest.mark.parametrize("make", [full, tiny, demo])
def test_transformers_builds_the_same_model_from_what_is_written(make):
    from transformers import Glm5NextConfig

    architecture = make()
    text = Glm5NextConfig(**architecture.released_config()).text_config
    kinds = {"linear_attention": "kda", "indexed_attention": "dsa"}
    assert tuple(kinds[kind] for kind in text.layer_types) == architecture.attention_kinds
    assert text.mlp_layer_types == ["dense" if kind == "dense" else "sparse" for kind in architecture.mlp_kinds]
    assert text.indexer_types == ["full"] * architecture.num_hidden_layers
    assert text.index_kpool == architecture.index_kpool == 4
    assert (text.linear_num_heads, text.linear_head_dim) == (architecture.kda_num_heads, architecture.kda_head_dim)
    assert (text.linear_conv_kernel_dim, text.linear_lower_bound) == (4, -5.0)
    assert text.qk_head_dim == architecture.qk_head_dim


# What SGLang and transformers have a default of their own for, or read from another key than the other
EVERY_WRITTEN_TEXT_KEY = {
    "mhc", "index_kpool", "index_kpool_compress", "index_kpool_always_select_tail", "linear_attn_config", "layer_types",
    "mlp_layer_types", "first_k_dense_replace", "swiglu_limit", "indexer_types", "index_topk_freq", "hc_mult", "hc_eps",
    "hc_sinkhorn_iters", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "head_dim", "num_key_value_heads",
    "n_group", "topk_group", "scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "mla_use_nope",
    "moe_router_dtype", "moe_layer_freq", "num_nextn_predict_layers", "attention_bias", "hidden_act", "rms_norm_eps",
}  # fmt: skip


@pytest.mark.parametrize("text_only", [False, True], ids=["whole", "text-only"])
@pytest.mark.parametrize("spelled", [released, in_transformers_spelling])
def test_released_config_is_written_in_full_whatever_was_read(spelled, text_only):
    config = spelled()
    config = config["text_config"] if text_only else config
    architecture = Architecture.from_config(config)
    written = json.loads(json.dumps(architecture.released_config()))
    text = written["text_config"]
    assert text.keys() >= EVERY_WRITTEN_TEXT_KEY
    assert text.keys().isdisjoint({"linear_num_heads", "linear_head_dim", "linear_lower_bound"})
    for key in EVERY_WRITTEN_TEXT_KEY:
        assert text[key] == RELEASED["text_config"][key], key
    assert text["eos_token_id"] == [154820, 154827, 154829]
    assert (written["model_type"], text["model_type"]) == ("glm5_next", "glm5_next_text")
    assert "vocab_size" not in written and "text_config" not in text
    assert Architecture.from_config(written) == architecture
    if not text_only:
        assert written["quantization_config"] == RELEASED["quantization_config"]
        assert written["vision_config"] == RELEASED["vision_config"]
        assert written["image_token_id"] == 154854


def test_dense_layers_that_do_not_come_first_are_written_without_first_k_dense_replace():
    kinds = ["dense", "sparse", "dense"] + ["sparse"] * 42
    architecture = Architecture.from_config(changed(mlp_layer_types=kinds, first_k_dense_replace=...))
    text = architecture.released_config()["text_config"]
    assert "first_k_dense_replace" not in text
    assert text["mlp_layer_types"] == kinds


def test_no_lower_bound_is_written_so_that_transformers_reads_none():
    from transformers import Glm5NextConfig

    config = changed(linear_attn_config__gate_lower_bound=None)
    config["text_config"]["linear_attn_config"]["safe_gate"] = False
    architecture = Architecture.from_config(config)
    assert architecture.gate_lower_bound is None
    written = architecture.released_config()
    assert Glm5NextConfig(**written).text_config.linear_lower_bound is None
    assert Architecture.from_config(written) == architecture
    flat = in_transformers_spelling()
    flat["text_config"]["linear_lower_bound"] = None
    assert Architecture.from_config(flat) == architecture


def test_changing_what_was_written_changes_neither_architecture_nor_source():
    config = released()
    architecture = Architecture.from_config(config)
    written = architecture.released_config()
    written["vision_config"]["depth"] = 1
    written["text_config"]["linear_attn_config"]["num_heads"] = 1
    written["text_config"]["rope_parameters"]["rope_theta"] = 1
    assert config == RELEASED
    assert architecture.released_config()["text_config"]["rope_parameters"]["rope_theta"] == 800000


def test_other_indexer_schedules_are_not_written_beside_indexer_types():
    config = changed(indexer_types=..., index_topk_pattern="F" * 45, index_skip_topk_offset=3)
    text = Architecture.from_config(config).released_config()["text_config"]
    assert text["indexer_types"] == ["full"] * 45
    assert text.keys().isdisjoint({"index_topk_pattern", "index_skip_topk_offset"})


def test_mtp_layer_of_the_file_is_no_wish():
    assert Architecture.from_config(RELEASED).num_nextn_predict_layers == 1
    assert Architecture.from_config(changed(num_nextn_predict_layers=0)).num_nextn_predict_layers == 0
    with pytest.raises(ConfigError) as error:
        Architecture.from_config(RELEASED, mtp_layers=1)
    assert error.value.field == "mtp_layers"


@pytest.mark.parametrize(("kpool", "topk"), [(4, 2048), (16, 2048), (8, 16), (2, 2), (3, 9)])
def test_every_kpool_that_divides_topk_is_read(kpool, topk):
    architecture = Architecture.from_config(changed(index_kpool=kpool, index_topk=topk))
    assert architecture.selection_width == topk + kpool - 1
    assert architecture.index_pools == topk // kpool


def schedule_of(layers: int, **text: object) -> dict:
    return changed(num_hidden_layers=layers, **text)


TYPES = RELEASED["text_config"]["layer_types"]
TRAPS = [
    # index_kpool: 4 in the release, 16 as a class default
    ("index_kpool", changed(index_kpool=...)),
    ("index_kpool", changed(index_kpool=0)),
    ("index_kpool", changed(index_kpool=True)),
    ("index_topk", changed(index_kpool=5)),
    ("index_topk", changed(index_topk=2050)),
    ("index_kpool_compress", changed(index_kpool_compress=False)),
    ("index_kpool_always_select_tail", changed(index_kpool_always_select_tail=False)),
    # layer kinds: two sources that must agree
    ("layer_types", changed(layer_types=..., linear_attn_config__kda_layers=...)),
    ("layer_types", changed(layer_types=["sliding_attention", *TYPES[1:]])),
    ("layer_types", changed(layer_types=TYPES[:44])),
    ("layer_types", changed(layer_types=45)),
    ("linear_attn_config.kda_layers", changed(layer_types=["deepseek_sparse_attention", *TYPES[1:]])),
    ("linear_attn_config.kda_layers", changed(linear_attn_config__kda_layers=[i + 1 for i in KDA_LAYERS])),
    ("linear_attn_config.kda_layers", changed(linear_attn_config__kda_layers=[*KDA_LAYERS[:-1], 43],
                                              linear_attn_config__full_attn_layers=...)),
    ("linear_attn_config.kda_layers", changed(linear_attn_config__kda_layers=[*KDA_LAYERS, 44])),
    ("linear_attn_config.kda_layers", changed(linear_attn_config__kda_layers=[-1, *KDA_LAYERS[1:]])),
    ("linear_attn_config.full_attn_layers", changed(linear_attn_config__full_attn_layers=DSA_LAYERS[:-1])),
    ("linear_attn_config", changed(linear_attn_config=[64, 128])),
    # dense layers: transformers ignores first_k_dense_replace
    ("first_k_dense_replace", changed(first_k_dense_replace=1)),
    ("first_k_dense_replace", changed(first_k_dense_replace=-1, mlp_layer_types=...)),
    ("mlp_layer_types", changed(first_k_dense_replace=..., mlp_layer_types=...)),
    ("mlp_layer_types", changed(mlp_layer_types=["dense"] * 3 + ["moe"] * 42)),
    ("mlp_layer_types", changed(mlp_layer_types=["dense"] * 3 + ["sparse"] * 41)),
    ("moe_layer_freq", changed(moe_layer_freq=2)),
    # a slice that forgot to shorten its lists
    ("indexer_types", schedule_of(8, layer_types=TYPES[:8], mlp_layer_types=["dense"] * 3 + ["sparse"] * 5,
                                  linear_attn_config__kda_layers=[0, 1, 2, 4, 5, 6],
                                  linear_attn_config__full_attn_layers=[3, 7])),
    ("linear_attn_config.kda_layers", schedule_of(8, layer_types=TYPES[:8])),
    # only full indexers, however it is said
    ("indexer_types", changed(indexer_types=["full"] * 43 + ["shared", "full"])),
    ("indexer_types", changed(indexer_types=["full"] * 44 + ["none"])),
    ("index_topk_pattern", changed(indexer_types=..., index_topk_pattern="FFFS" * 11 + "F")),
    ("index_topk_pattern", changed(indexer_types=..., index_topk_pattern="FSSF")),
    ("index_topk_pattern", changed(indexer_types=..., index_topk_pattern="X" * 45)),
    ("index_topk_freq", changed(indexer_types=..., index_topk_freq=4)),
    ("index_topk_freq", changed(indexer_types=..., index_topk_freq=0)),
    # attention
    ("qk_rope_head_dim", changed(qk_rope_head_dim=64)),
    ("mla_use_nope", changed(mla_use_nope=False)),
    ("qk_head_dim", changed(qk_head_dim=192)),
    ("num_key_value_heads", changed(num_key_value_heads=8)),
    ("q_lora_rank", changed(q_lora_rank=None)),
    ("attention_bias", changed(attention_bias=True)),
    # KDA: a lower bound with no default that frameworks share
    ("linear_attn_config.gate_lower_bound", changed(linear_attn_config__gate_lower_bound=...)),
    ("linear_attn_config.gate_lower_bound", changed(linear_attn_config__gate_lower_bound=None)),
    ("linear_attn_config.gate_lower_bound", changed(linear_attn_config__gate_lower_bound=5.0)),
    ("linear_attn_config.gate_lower_bound", changed(linear_lower_bound=-4.0)),
    ("linear_attn_config.num_heads", changed(linear_num_heads=32)),
    ("linear_attn_config.head_dim", changed(linear_attn_config__head_dim=...)),
    ("linear_attn_config.short_conv_kernel_size", changed(linear_attn_config__short_conv_kernel_size=0)),
    # mHC and MLP: SGLang's defaults are another model
    ("mhc", changed(mhc=False)),
    ("hc_mult", changed(hc_mult=...)),
    ("hc_eps", changed(hc_eps=...)),
    ("hc_eps", changed(hc_eps=-1e-6)),
    ("hc_sinkhorn_iters", changed(hc_sinkhorn_iters=0)),
    ("swiglu_limit", changed(swiglu_limit=None)),
    ("swiglu_limit", changed(swiglu_limit=...)),
    ("swiglu_limit", changed(swiglu_limit=0.0)),
    ("swiglu_limit", changed(swiglu_limit=float("inf"))),
    ("hidden_act", changed(hidden_act="gelu")),
    # router
    ("scoring_func", changed(scoring_func="softmax")),
    ("topk_method", changed(topk_method="greedy")),
    ("n_group", changed(n_group=8)),
    ("topk_group", changed(topk_group=4)),
    ("moe_router_dtype", changed(moe_router_dtype="bfloat16")),
    ("num_experts_per_tok", changed(num_experts_per_tok=289)),
    ("norm_topk_prob", changed(norm_topk_prob="false")),
    ("routed_scaling_factor", changed(routed_scaling_factor=...)),
    # sizes
    ("hidden_size", changed(hidden_size="4096")),
    ("vocab_size", changed(vocab_size=...)),
    ("num_hidden_layers", changed(num_hidden_layers=0)),
    ("rms_norm_eps", changed(rms_norm_eps=float("nan"))),
    ("num_nextn_predict_layers", changed(num_nextn_predict_layers=-1)),
    # another model
    ("tie_word_embeddings", released() | {"tie_word_embeddings": True}),
    ("tie_word_embeddings", changed(tie_word_embeddings=True)),
    ("model_type", changed(model_type="glm_moe_dsa")),
    ("model_type", released() | {"model_type": "glm4v"}),
    ("model_type", {key: value for key, value in RELEASED["text_config"].items() if key != "model_type"}),
    ("text_config", released() | {"text_config": [1]}),
    ("vision_config", released() | {"vision_config": "none"}),
    ("vision_config.depth", released() | {"vision_config": {**RELEASED["vision_config"], "depth": None}}),
    ("vision_config.num_heads", released() | {"vision_config": {**RELEASED["vision_config"], "num_heads": 15}}),
    ("vision_config.patch_size", released() | {"vision_config": {**RELEASED["vision_config"], "patch_size": [14, 7]}}),
    ("vision_config.attention_bias", released() | {"vision_config": {**RELEASED["vision_config"],
                                                                     "attention_bias": False}}),
    ("config", [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "config"), TRAPS, ids=[f"{i}-{field}" for i, (field, _) in enumerate(TRAPS)])
def test_trap_is_an_error_that_names_the_field(field, config):
    with pytest.raises(ConfigError) as error:
        Architecture.from_config(config)
    assert error.value.field == field
    assert repr(field) in str(error.value) and "needed: " in str(error.value)


def test_absent_vision_size_is_an_error_that_names_it():
    for key in ("depth", "out_hidden_size", "projection_intermediate_size"):
        config = released()
        del config["vision_config"][key]
        with pytest.raises(ConfigError) as error:
            Architecture.from_config(config)
        assert error.value.field == f"vision_config.{key}"


def test_no_value_of_any_key_raises_another_error():
    junk = [None, True, -1, 0, 1.5, float("nan"), "x", "", [], [[]], {}, {"a": 1}, [1, "a"], ["full"] * 45]
    places = [(key,) for key in RELEASED["text_config"]]
    places += [("linear_attn_config", key) for key in RELEASED["text_config"]["linear_attn_config"]]
    for place in places:
        for value in junk:
            for base in ({}, {"indexer_types": ...}, {"layer_types": ..., "mlp_layer_types": ...}):
                config = changed(**base)
                holder = config["text_config"]
                for level in place[:-1]:
                    holder = holder[level]
                holder[place[-1]] = value
                try:
                    written = Architecture.from_config(config).released_config()
                except ConfigError:
                    continue
                assert written["text_config"]["num_hidden_layers"] == 45


def test_directory_and_file_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert Architecture.from_pretrained(tmp_path) == full()
    assert Architecture.from_pretrained(tmp_path / "config.json") == full()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\x00"])
def test_file_that_holds_no_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config"):
        Architecture.from_pretrained(tmp_path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        Architecture.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Architecture.from_pretrained(tmp_path / "nowhere")


def test_architectures_are_values():
    assert tiny() == tiny() and hash(tiny()) == hash(tiny())
    assert tiny() != tiny(index_kpool=16)
    with pytest.raises(AttributeError):
        tiny().hidden_size = 1
