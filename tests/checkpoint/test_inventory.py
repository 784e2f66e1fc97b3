"""The inventory against the released checkpoint's names, shapes, dtypes and counts, written out here by hand."""

from collections import Counter

import pytest

from glm5next_plugin.checkpoint.inventory import FP32_KINDS, expected_tensors, kind_of, kinds, scale_shape
from glm5next_plugin.recipes.variants import demo, full, tiny

P = "model.language_model.layers.*."

# kind -> shape in the release; "fp8" where the FP8 release stores FP8 and a scale, "f32" for the kinds that stay fp32
TEXT = {
    "model.language_model.embed_tokens.weight": (154880, 4096),
    "model.language_model.norm.weight": (4096,),
    "lm_head.weight": (154880, 4096),
    # mHC
    P + "hc_attn_fn": (24, 16384),
    P + "hc_ffn_fn": (24, 16384),
    P + "hc_attn_base": (24, "f32"),
    P + "hc_ffn_base": (24, "f32"),
    P + "hc_attn_scale": (3, "f32"),
    P + "hc_ffn_scale": (3, "f32"),
    # norms
    P + "input_layernorm.weight": (4096,),
    P + "post_attention_layernorm.weight": (4096,),
    # KDA
    P + "self_attn.q_proj.weight": (8192, 4096),
    P + "self_attn.k_proj.weight": (8192, 4096),
    P + "self_attn.v_proj.weight": (8192, 4096),
    P + "self_attn.f_a_proj.weight": (128, 4096),
    P + "self_attn.g_a_proj.weight": (128, 4096),
    P + "self_attn.f_b_proj.weight": (8192, 128),
    P + "self_attn.g_b_proj.weight": (8192, 128),
    P + "self_attn.b_proj.weight": (64, 4096),
    P + "self_attn.A_log": (64, "f32"),
    P + "self_attn.dt_bias": (8192, "f32"),
    P + "self_attn.q_conv1d.weight": (8192, 1, 4),
    P + "self_attn.k_conv1d.weight": (8192, 1, 4),
    P + "self_attn.v_conv1d.weight": (8192, 1, 4),
    P + "self_attn.o_norm.weight": (128,),
    # DSA
    P + "self_attn.q_a_proj.weight": (1536, 4096, "fp8"),
    P + "self_attn.q_b_proj.weight": (16384, 1536, "fp8"),
    P + "self_attn.kv_a_proj_with_mqa.weight": (512, 4096, "fp8"),
    P + "self_attn.kv_b_proj.weight": (32768, 512),
    P + "self_attn.q_a_layernorm.weight": (1536,),
    P + "self_attn.kv_a_layernorm.weight": (512,),
    P + "self_attn.indexer.wq_b.weight": (4096, 1536),
    P + "self_attn.indexer.wk.weight": (128, 4096),
    P + "self_attn.indexer.weights_proj.weight": (32, 4096),
    P + "self_attn.indexer.k_norm.weight": (128,),
    P + "self_attn.indexer.k_norm.bias": (128,),
    P + "self_attn.indexer.index_kpool_compress_gate": (128, 4096),
    P + "self_attn.indexer.index_kpool_compress_ape": (4, 128),
    # dense MLP
    P + "mlp.gate_proj.weight": (12288, 4096, "fp8"),
    P + "mlp.up_proj.weight": (12288, 4096, "fp8"),
    P + "mlp.down_proj.weight": (4096, 12288, "fp8"),
    # MoE
    P + "mlp.gate.weight": (288, 4096),
    P + "mlp.gate.e_score_correction_bias": (288, "f32"),
    P + "mlp.shared_experts.gate_proj.weight": (2048, 4096, "fp8"),
    P + "mlp.shared_experts.up_proj.weight": (2048, 4096, "fp8"),
    P + "mlp.shared_experts.down_proj.weight": (4096, 2048, "fp8"),
    P + "mlp.experts.*.gate_proj.weight": (2048, 4096, "fp8"),
    P + "mlp.experts.*.up_proj.weight": (2048, 4096, "fp8"),
    P + "mlp.experts.*.down_proj.weight": (4096, 2048, "fp8"),
    # MTP
    P + "enorm.weight": (4096,),
    P + "hnorm.weight": (4096,),
    P + "eh_proj.weight": (4096, 8192),
    P + "shared_head.norm.weight": (4096,),
}
# One kind of two shapes: KDA never FP8, DSA FP8
O_PROJ = P + "self_attn.o_proj.weight"
O_PROJ_KDA, O_PROJ_DSA = (4096, 8192), (4096, 16384)

V = "model.visual."
B = V + "blocks.*."
VISION = {
    B + "norm1.weight": (1024,),
    B + "norm2.weight": (1024,),
    B + "attn.qkv.weight": (3072, 1024),
    B + "attn.qkv.bias": (3072,),
    B + "attn.proj.weight": (1024, 1024),
    B + "attn.proj.bias": (1024,),
    B + "attn.q_norm.weight": (64,),
    B + "attn.k_norm.weight": (64,),
    B + "mlp.gate_proj.weight": (4096, 1024),
    B + "mlp.gate_proj.bias": (4096,),
    B + "mlp.up_proj.weight": (4096, 1024),
    B + "mlp.up_proj.bias": (4096,),
    B + "mlp.down_proj.weight": (1024, 4096),
    B + "mlp.down_proj.bias": (1024,),
    V + "patch_embed.proj.weight": (1024, 3, 2, 14, 14),
    V + "patch_embed.proj.bias": (1024,),
    V + "downsample.weight": (4096, 1024, 2, 2),
    V + "downsample.bias": (4096,),
    V + "post_layernorm.weight": (1024,),
    V + "merger.proj.weight": (4096, 4096),
    V + "merger.gate_proj.weight": (10240, 4096),
    V + "merger.up_proj.weight": (10240, 4096),
    V + "merger.down_proj.weight": (4096, 10240),
    V + "merger.post_projection_norm.weight": (4096,),
    V + "merger.post_projection_norm.bias": (4096,),
}

CLASSES_OF_FP8_RELEASE = {
    "routed_experts": 72_576,
    "mtp": 1_760,
    "kda": 510,
    "vision": 347,
    "hyper_connections": 270,
    "shared_experts": 252,
    "dsa": 121,
    "norms": 91,
    "router": 84,
    "indexer": 77,
    "dense_mlp": 18,
    "embed_tokens": 1,
    "lm_head": 1,
}


@pytest.fixture(scope="module")
def fp8_release():
    return expected_tensors(full(), fp8_block=(128, 128))


@pytest.fixture(scope="module")
def bf16_release():
    return expected_tensors(full())


def test_there_are_67_text_kinds_and_25_vision_kinds():
    weights = [*TEXT, O_PROJ]
    scales = [kind + "_scale_inv" for kind, shape in TEXT.items() if "fp8" in shape] + [O_PROJ + "_scale_inv"]
    assert (len(weights), len(scales), len(VISION)) == (54, 13, 25)
    assert len(kinds()) == len(set(kinds())) == 92
    assert set(kinds()) == {*weights, *scales, *VISION}


def test_release_has_76108_tensors_of_the_published_classes(fp8_release):
    assert Counter(spec.group for spec in fp8_release.values()) == CLASSES_OF_FP8_RELEASE
    assert len(fp8_release) == 76_108
    assert sum(spec.group != "vision" for spec in fp8_release.values()) == 75_761
    assert {spec.kind for spec in fp8_release.values()} == set(kinds())


def test_release_has_37338_fp8_matrices_each_with_its_scale(fp8_release, bf16_release):
    quantised = [name for name, spec in fp8_release.items() if spec.dtype == "F8_E4M3"]
    assert len(quantised) == 37_338
    assert fp8_release.keys() - bf16_release.keys() == {name + "_scale_inv" for name in quantised}
    assert len(bf16_release) == 76_108 - 37_338


@pytest.mark.parametrize("kind", TEXT)
def test_text_kind_has_the_released_shape_and_dtype(kind, fp8_release):
    *shape, last = TEXT[kind]
    shape, dtype = (
        ((*shape,), {"fp8": "F8_E4M3", "f32": "F32"}[last]) if last in ("fp8", "f32") else ((*shape, last), "BF16")
    )
    specs = [(name, spec) for name, spec in fp8_release.items() if spec.kind == kind]
    assert specs
    for name, spec in specs:
        assert (spec.shape, spec.dtype) == (shape, dtype), name
        if dtype == "F8_E4M3":
            scale = fp8_release[name + "_scale_inv"]
            assert (scale.dtype, scale.shape) == ("F32", tuple(-(-size // 128) for size in shape))


def test_o_proj_is_fp8_in_dsa_and_never_in_kda(fp8_release):
    for layer in range(46):
        spec = fp8_release[f"model.language_model.layers.{layer}.self_attn.o_proj.weight"]
        dsa = layer % 4 == 3 or layer == 45
        expected = (O_PROJ_DSA, "F8_E4M3") if dsa else (O_PROJ_KDA, "BF16")
        assert (spec.shape, spec.dtype, spec.kind) == (*expected, O_PROJ), layer


@pytest.mark.parametrize("kind", VISION)
def test_vision_kind_has_the_released_shape_and_is_bf16(kind, fp8_release):
    specs = [spec for spec in fp8_release.values() if spec.kind == kind]
    assert {(spec.shape, spec.dtype, spec.fp8) for spec in specs} == {(VISION[kind], "BF16", False)}
    assert len(specs) == (24 if ".blocks." in kind else 1)


def test_layers_hold_what_their_place_in_the_schedule_says(bf16_release):
    def below(layer: int) -> set[str]:
        prefix = f"model.language_model.layers.{layer}."
        return {name.removeprefix(prefix) for name in bf16_release if name.startswith(prefix)}

    hyper_connections = {"hc_attn_fn", "hc_ffn_fn", "hc_attn_base", "hc_ffn_base", "hc_attn_scale", "hc_ffn_scale"}
    mtp = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    for layer in range(45):
        assert hyper_connections <= below(layer)
        assert mtp.isdisjoint(below(layer))
        assert ("mlp.gate_proj.weight" in below(layer)) == (layer < 3)
        assert ("mlp.experts.287.down_proj.weight" in below(layer)) == (layer >= 3)
        assert ("self_attn.A_log" in below(layer)) == (layer % 4 != 3)
        assert ("self_attn.indexer.wk.weight" in below(layer)) == (layer % 4 == 3)
    assert mtp < below(45)
    assert below(45) - mtp == below(43) - hyper_connections
    assert not below(46)


def test_fp32_kinds_are_the_five(bf16_release):
    expected = {P + name for name in ("self_attn.A_log", "self_attn.dt_bias", "mlp.gate.e_score_correction_bias")}
    expected |= {P + f"hc_{where}_{what}" for where in ("attn", "ffn") for what in ("base", "scale")}
    assert {spec.kind for spec in bf16_release.values() if spec.dtype == "F32"} == expected
    assert {kind for kind in kinds() if kind.endswith(FP32_KINDS)} == expected
    named = Counter(name.rpartition(".")[2] for name in bf16_release if name.endswith(FP32_KINDS))
    assert named == {
        "A_log": 34,
        "dt_bias": 34,
        "hc_attn_base": 45,
        "hc_ffn_base": 45,
        "hc_attn_scale": 45,
        "hc_ffn_scale": 45,
        "e_score_correction_bias": 43,
    }


def test_vision_and_mtp_are_left_out_on_request(bf16_release):
    text = expected_tensors(full(), vision=False, mtp=False)
    assert len(text) == 38_770 - 347 - (1_760 - 871)
    assert not any(".layers.45." in name or name.startswith("model.visual.") for name in text)
    assert text.items() <= bf16_release.items()


def test_config_without_vision_or_mtp_has_none_of_their_tensors():
    groups = {spec.group for spec in expected_tensors(demo(num_nextn_predict_layers=0)).values()}
    assert groups == CLASSES_OF_FP8_RELEASE.keys() - {"mtp"}
    from glm5next_plugin.architecture import Architecture

    text_only = Architecture.from_config(demo().released_config()["text_config"])
    assert {spec.group for spec in expected_tensors(text_only).values()} == CLASSES_OF_FP8_RELEASE.keys() - {"vision"}


def test_sizes_follow_the_config():
    specs = expected_tensors(tiny(index_kpool=16, n_shared_experts=2, hc_mult=2))
    layer = "model.language_model.layers.3."
    assert specs[layer + "self_attn.indexer.index_kpool_compress_ape"].shape == (16, 32)
    assert specs[layer + "mlp.shared_experts.gate_proj.weight"].shape == (2 * 64, 256)
    assert specs[layer + "hc_attn_fn"].shape == (8, 512)
    assert specs[layer + "hc_attn_base"].shape == (8,)
    assert specs["model.language_model.layers.8.mlp.experts.15.up_proj.weight"].group == "mtp"


def test_kind_of_a_name_replaces_layer_block_and_expert():
    assert (
        kind_of("model.language_model.layers.44.mlp.experts.287.up_proj.weight") == P + "mlp.experts.*.up_proj.weight"
    )
    assert kind_of("model.visual.blocks.23.norm1.weight") == B + "norm1.weight"
    assert kind_of(P + "self_attn.q_conv1d.weight") == P + "self_attn.q_conv1d.weight"


@pytest.mark.parametrize(
    ("shape", "blocks"), [((128, 128), (1, 1)), ((129, 128), (2, 1)), ((1, 257), (1, 3)), ((256, 127), (2, 1))]
)
def test_ragged_edge_has_a_block_of_its_own(shape, blocks):
    assert scale_shape(shape, (128, 128)) == blocks
