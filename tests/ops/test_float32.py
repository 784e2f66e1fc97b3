import pytest
import torch

from glm5next_plugin.ops.float32 import ieee_float32, linear_float32, matmul_float32
from tests.ops.comparing import gradients, leaf


@pytest.fixture
def reduced_precision():
    """The settings with which trainers allow TF32, and bf16 on a CPU."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = "tf32", "bf16"
    yield settings
    for setting, precision in zip(settings, before, strict=True):
        setting.fp32_precision = precision


def test_products_inside_are_ieee_and_settings_come_back(reduced_precision):
    with pytest.raises(KeyError), ieee_float32(torch.device("cpu")):
        assert [setting.fp32_precision for setting in reduced_precision] == ["ieee", "ieee"]
        raise KeyError
    assert [setting.fp32_precision for setting in reduced_precision] == ["tf32", "bf16"]


def test_values_and_gradients_do_not_depend_on_settings_or_autocast(reduced_precision):
    x, weight = leaf(64, 32), leaf(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_float32(x, weight)
    assert found.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    for a, b in zip(gradients([found], [x, weight]), gradients([expected], [x, weight]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_bf16_operands_multiply_in_fp32_and_get_bf16_gradients():
    x, weight = torch.randn(5, 32).bfloat16().requires_grad_(), torch.randn(3, 32).bfloat16().requires_grad_()
    found = linear_float32(x, weight)
    assert torch.equal(found, torch.nn.functional.linear(x.float(), weight.float()))
    assert [grad.dtype for grad in gradients([found], [x, weight])] == [torch.bfloat16, torch.bfloat16]


def test_batched_product_matches_torch():
    a, b = leaf(2, 3, 4, 5), leaf(2, 3, 5, 6)
    found, expected = matmul_float32(a, b), a @ b
    assert torch.equal(found, expected)
    for one, other in zip(gradients([found], [a, b]), gradients([expected], [a, b]), strict=True):
        torch.testing.assert_close(one, other)
