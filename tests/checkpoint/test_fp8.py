"""Block-scaled FP8: exact values, ragged edges, and the block size from the config alone."""

import pytest
import torch

from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.checkpoint.fp8 import block_size, dequantize_block


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
