"""Names of the three spellings, pair by pair."""

import pytest

from glm5next_plugin.checkpoint.spelling import released_parts, spelling_of

L = "model.language_model.layers.7."


@pytest.mark.parametrize(
    ("stored", "released"),
    [
        # transformers
        (L + "self_attn.forget_gate.f_a_proj.weight", L + "self_attn.f_a_proj.weight"),
        (L + "self_attn.forget_gate.f_b_proj.weight", L + "self_attn.f_b_proj.weight"),
        (L + "self_attn.forget_gate.A_log", L + "self_attn.A_log"),
        (L + "self_attn.forget_gate.dt_bias", L + "self_attn.dt_bias"),
        (L + "attn_hc.fn", L + "hc_attn_fn"),
        (L + "attn_hc.base", L + "hc_attn_base"),
        (L + "attn_hc.scale", L + "hc_attn_scale"),
        (L + "ffn_hc.fn", L + "hc_ffn_fn"),
        (L + "ffn_hc.base", L + "hc_ffn_base"),
        (L + "ffn_hc.scale", L + "hc_ffn_scale"),
        # text-only
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("model.layers.7.mlp.gate.weight", L + "mlp.gate.weight"),
        ("model.layers.7.mlp.experts.3.down_proj.weight_scale_inv", L + "mlp.experts.3.down_proj.weight_scale_inv"),
        # both
        ("model.layers.7.self_attn.forget_gate.A_log", L + "self_attn.A_log"),
        # alike in all
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"),
        (L + "self_attn.g_a_proj.weight", L + "self_attn.g_a_proj.weight"),
        # not known to any
        ("model.language_model.attn_hc.fn", "model.language_model.attn_hc.fn"),
        ("optimizer.step", "optimizer.step"),
    ],
)
def test_name_becomes_the_released_one(stored, released):
    (part,) = released_parts(stored, (5, 6))
    assert (part.name, part.start, part.shape) == (released, 0, (5, 6))


def test_merged_convolution_holds_q_k_and_v_along_rows():
    parts = released_parts("model.layers.7.self_attn.conv1d.weight", (12, 1, 4))
    assert [(part.name, part.start, part.shape) for part in parts] == [
        (L + "self_attn.q_conv1d.weight", 0, (4, 1, 4)),
        (L + "self_attn.k_conv1d.weight", 16, (4, 1, 4)),
        (L + "self_attn.v_conv1d.weight", 32, (4, 1, 4)),
    ]


def test_stacked_experts_hold_gate_above_up():
    parts = released_parts(L + "mlp.experts.gate_up_proj", (2, 6, 5))
    assert [(part.name, part.start, part.shape) for part in parts] == [
        (L + "mlp.experts.0.gate_proj.weight", 0, (3, 5)),
        (L + "mlp.experts.0.up_proj.weight", 15, (3, 5)),
        (L + "mlp.experts.1.gate_proj.weight", 30, (3, 5)),
        (L + "mlp.experts.1.up_proj.weight", 45, (3, 5)),
    ]
    parts = released_parts(L + "mlp.experts.down_proj", (2, 5, 3))
    assert [(part.name, part.shape) for part in parts] == [
        (L + "mlp.experts.0.down_proj.weight", (5, 3)),
        (L + "mlp.experts.1.down_proj.weight", (5, 3)),
    ]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("self_attn.conv1d.weight", (13, 1, 4)), ("mlp.experts.gate_up_proj", (2, 5, 5)), ("mlp.experts.down_proj", (2,))],
)
def test_merged_tensor_that_does_not_divide_is_refused(name, shape):
    with pytest.raises(ValueError, match="does not divide"):
        released_parts(L + name, shape)


def test_names_show_their_spelling():
    assert spelling_of(L + "self_attn.A_log") == set()
    assert spelling_of(L + "attn_hc.fn") == {"transformers"}
    assert spelling_of("model.layers.7.self_attn.A_log") == {"text-only"}
    assert spelling_of("model.layers.7.mlp.experts.down_proj") == {"text-only", "transformers"}
    assert spelling_of("lm_head.weight") == set()
