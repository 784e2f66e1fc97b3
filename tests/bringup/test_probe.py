"""The comparison part by part."""

import pytest
import torch

from glm5next_plugin.bringup.diagnosis import probe_finding
from glm5next_plugin.bringup.probe import compare, first_difference, parts, selected_mask
from glm5next_plugin.recipes.variants import demo

ARCHITECTURE = demo()
SAMPLES, LENGTH = 4, 32


def recording(seed=0):
    """Random results for every part of the demo model."""
    generator = torch.Generator().manual_seed(seed)

    def result(name):
        shape = (SAMPLES, LENGTH, 8)
        if name.endswith((".indexer", ".router")):
            return torch.rand(shape, generator=generator) < 0.5
        return torch.randn(shape, generator=generator)

    return {part.name: result(part.name) for part in parts(ARCHITECTURE)}


def test_the_parts_follow_the_computation():
    names = [part.name for part in parts(ARCHITECTURE)]
    assert names[:7] == [
        "embedding",
        "layers.0.attn_hc",
        "layers.0.input_norm",
        "layers.0.attention",
        "layers.0.ffn_hc",
        "layers.0.post_norm",
        "layers.0.mlp",
    ]
    assert names[-10:] == [
        "layers.3.attn_hc",
        "layers.3.input_norm",
        "layers.3.indexer",
        "layers.3.attention",
        "layers.3.ffn_hc",
        "layers.3.post_norm",
        "layers.3.router",
        "layers.3.mlp",
        "final_norm",
        "logits",
    ]


def test_equal_recordings_agree_everywhere():
    assert first_difference(compare(ARCHITECTURE, recording(), recording(), "fp32")) is None


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("layers.0.attention", "layer 0, KDA attention"),
        ("layers.1.mlp", "layer 1, MoE experts"),
        ("layers.0.mlp", "layer 0, dense MLP"),
        ("layers.2.ffn_hc", "layer 2, mHC before the MLP"),
        ("logits", "output head"),
    ],
)
def test_the_first_part_that_differs_is_named(name, title):
    ours, theirs = recording(), recording()
    later = [part.name for part in parts(ARCHITECTURE)]
    for changed in later[later.index(name) :]:
        if ours[changed].dtype != torch.bool:
            ours[changed] = ours[changed] * 1.001
    finding = probe_finding(compare(ARCHITECTURE, ours, theirs, "fp32"), step=3)
    assert finding.title == f"step 3: trainer and engine part at {title}"


@pytest.mark.parametrize(
    ("name", "title"), [("layers.3.indexer", "layer 3, DSA indexer"), ("layers.2.router", "layer 2, MoE router")]
)
def test_choices_are_compared_as_sets(name, title):
    ours, theirs = recording(), recording()
    ours[name] = ours[name].clone()
    ours[name][:, ::8] ^= True
    finding = probe_finding(compare(ARCHITECTURE, ours, theirs, "fp32"), step=1)
    assert finding.title.endswith(title)


def test_single_tokens_that_flip_are_noise():
    ours, theirs = recording(), recording()
    ours["layers.1.router"] = ours["layers.1.router"].clone()
    ours["layers.1.router"][0, 5] ^= True
    ours["layers.1.mlp"][0, 5] += 1
    assert first_difference(compare(ARCHITECTURE, ours, theirs, "fp32")) is None


def test_nan_differs_even_from_nan():
    ours, theirs = recording(), recording()
    ours["layers.0.mlp"][:] = theirs["layers.0.mlp"][:] = float("nan")
    assert first_difference(compare(ARCHITECTURE, ours, theirs, "fp32")).part.name == "layers.0.mlp"


def test_rounding_of_bf16_is_noise_in_bf16_and_a_difference_in_fp32():
    ours, theirs = recording(), recording()
    ours["layers.0.mlp"] = ours["layers.0.mlp"].to(torch.bfloat16)
    assert first_difference(compare(ARCHITECTURE, ours, theirs, "bf16")) is None
    assert first_difference(compare(ARCHITECTURE, ours, theirs, "fp32")).part.name == "layers.0.mlp"


def test_agreement_up_to_the_logits_points_at_decoding_and_definitions():
    finding = probe_finding(compare(ARCHITECTURE, recording(), recording(), "fp32"), step=1)
    assert "agree part by part" in finding.title
    assert any("decoding" in suspect for suspect in finding.suspects)


def test_a_selection_becomes_a_mask_without_its_padding():
    positions = torch.tensor([[[0, -1, -1], [0, 1, -1]]], dtype=torch.int32)
    assert selected_mask(positions, 3).tolist() == [[[True, False, False], [True, True, False]]]
