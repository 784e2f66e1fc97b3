"""Block-scaled FP8: exact values, ragged edges, and the block size from the config alone."""

import types

import pytest
import torch

from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.checkpoint.fp8 import block_size, dequantize_block, quantization_config, quantize_block
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.recipes import variants


def test_each_block_is_multiplied_by_its_own_scale():
    weight = torch.tensor([[1.0, -2.0, 448.0], [0.5, 0.0, -0.25], [3.0, -1.5, 2.0]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 0.5], [-4.0, 10.0]])
    expected = [[2.0, -4.0, 224.0], [1.0, 0.0, -0.125], [-12.0, 6.0, 20.0]]
    assert dequantize_block(weight, scale, (2, 2)).tolist() == expected


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 127), (127, 257), (300, 5)])
def test_every_entry_is_its_code_times_the_scale_of_its_block(shape):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * 50).to(torch.float8_e4m3fn)
    scale = torch.randn((-(-shape[0] // 128), -(-shape[1] // 128)), generator=generator)
    found = dequantize_block(weight, scale, (128, 128))
    assert found.dtype == torch.float32 and found.shape == shape
    for row in {0, shape[0] // 2, min(127, shape[0] - 1), min(128, shape[0] - 1), shape[0] - 1}:
        for column in {0, min(127, shape[1] - 1), min(128, shape[1] - 1), shape[1] - 1}:
            expected = weight[row, column].float() * scale[row // 128, column // 128]
            assert found[row, column] == expected


def test_blocks_need_not_be_square():
    weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0]])
    assert dequantize_block(weight, scale, (4, 2))[0].tolist() == [1, 1, 2, 2, 3, 3]


# ---------------------------------------------------------------------- transformers
RAGGED = [(1, 1), (1, 300), (127, 128), (128, 129), (129, 127), (256, 384), (257, 5)]


def transformers_op(name, block):
    """transformers' own quantisation; it takes whole blocks alone."""
    from transformers.integrations import finegrained_fp8

    settings = types.SimpleNamespace(weight_block_size=block, scale_fmt="float")
    return getattr(finegrained_fp8, name)(types.SimpleNamespace(quantization_config=settings))


def whole_blocks(matrix, block):
    """The matrix with zeros after its last row and column, which change no block's largest magnitude."""
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1], dtype=matrix.dtype)
    padded[:rows, :columns] = matrix
    return padded


def signed(shape, dtype, seed=0):
    """Magnitudes over many octaves, with a row of zeros and of subnormals where there is room."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(4).exp()
    if shape[0] > 127:
        matrix[1], matrix[2] = 0.0, matrix[2] * 2.0**-100
    return matrix.to(dtype)


@pytest.mark.parametrize("block", [(128, 128), (64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_quantisation_is_that_of_transformers_to_the_bit(shape, dtype, block):
    matrix = signed(shape, dtype)
    weight, scale = quantize_block(matrix, block)
    padded = whole_blocks(matrix, block)
    expected = transformers_op("Fp8Quantize", block).convert({"a.weight": padded})
    assert weight.shape == shape and weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    kept = expected["a.weight"][: shape[0], : shape[1]]
    assert torch.equal(weight.view(torch.uint8), kept.view(torch.uint8))
    assert torch.equal(scale, expected["a.weight_scale_inv"])


@pytest.mark.parametrize("block", [(128, 128), (64, 32)], ids=str)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_dequantisation_is_that_of_transformers_to_the_bit(shape, block):
    weight = signed(shape, torch.float32, seed=1).clamp(-448, 448).to(torch.float8_e4m3fn)
    padded = whole_blocks(weight.float(), block).to(torch.float8_e4m3fn)
    scale = signed((padded.shape[0] // block[0], padded.shape[1] // block[1]), torch.float32, seed=2)
    scales = {"weight": padded, "weight_scale_inv": scale}
    expected = transformers_op("Fp8Dequantize", block).convert(scales)["weight"][: shape[0], : shape[1]]
    assert expected.dtype == torch.float32
    assert torch.equal(dequantize_block(weight, scale, block), expected)


@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_what_was_quantised_comes_back_within_the_rounding_of_fp8(shape):
    matrix = signed(shape, torch.bfloat16, seed=3)
    weight, scale = quantize_block(matrix, (128, 128))
    back = dequantize_block(weight, scale, (128, 128))
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert ((back - matrix.float()).abs() <= torch.maximum(matrix.float().abs() / 16, spread * 2.0**-10) * 1.001).all()


def test_every_fp8_code_but_nan_is_reproduced():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes != 0x7F) & (codes != 0xFF)].view(torch.float8_e4m3fn).view(2, 127)
    scale = torch.tensor([[0.25]])
    weight, found = quantize_block(dequantize_block(codes, scale, (128, 128)), (128, 128))
    assert torch.equal(weight.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(found, scale)


# ---------------------------------------------------------------------- refused
@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (4,), (3, 2)])
def test_scale_without_one_entry_a_block_is_refused(shape):
    weight = torch.ones(129, 257).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"need \[2, 3\]"):
        dequantize_block(weight, torch.ones(shape), (128, 128))


def test_block_size_comes_from_the_config():
    assert block_size({}) is None
    assert block_size({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}}) == (128, 64)
    assert block_size(
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    ) == (128, 128)


@pytest.mark.parametrize(
    ("field", "quantisation"),
    [
        ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", []),
        ("quantization_config.fmt", {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}),
        ("quantization_config.weight_block_size", {"quant_method": "fp8"}),
        ("quantization_config.weight_block_size", {"quant_method": "fp8", "weight_block_size": [128]}),
        ("quantization_config.weight_block_size", {"quant_method": "fp8", "weight_block_size": [128, 0]}),
    ],
)
def test_other_quantisation_is_refused_by_name(field, quantisation):
    with pytest.raises(ConfigError) as error:
        block_size({"quantization_config": quantisation})
    assert error.value.field == field


# ---------------------------------------------------------------------- the config that an export writes
KEPT = [  # of layer 0 (KDA), 3 (DSA, MoE) and the rest, by hand from the column "dtype" of the released table
    "model.language_model.layers.0.self_attn.q_proj",
    "model.language_model.layers.0.self_attn.o_proj",
    "model.language_model.layers.3.self_attn.kv_b_proj",
    "model.language_model.layers.3.self_attn.indexer.wq_b",
    "model.language_model.layers.3.mlp.gate",
    "model.language_model.embed_tokens",
    "model.language_model.layers.8.eh_proj",
    "lm_head",
]
CONVERTED = [
    "model.language_model.layers.0.mlp.down_proj",
    "model.language_model.layers.3.self_attn.o_proj",
    "model.language_model.layers.3.self_attn.kv_a_proj_with_mqa",
    "model.language_model.layers.3.mlp.experts.15.up_proj",
    "model.language_model.layers.3.mlp.shared_experts.gate_proj",
]


def test_modules_that_stay_are_named_with_and_without_language_model():
    config = quantization_config(expected_tensors(variants.tiny(), fp8_block=(128, 128)), (128, 128))
    assert (config["quant_method"], config["fmt"], config["weight_block_size"]) == ("fp8", "e4m3", [128, 128])
    named = set(config["modules_to_not_convert"])
    for spelled in (lambda name: name, lambda name: name.replace(".language_model.", ".")):
        assert named >= {spelled(name) for name in KEPT}
        assert not named & {spelled(name) for name in CONVERTED}
    assert block_size({"quantization_config": config}) == (128, 128)
