import pytest
import torch

from glm5next_plugin.ops.rms_norm import rms_norm
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import assert_same_values_and_gradients, leaf


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_matches_transformers(hf, scale):
    module = hf.Glm5NextTextRMSNorm(32, eps=1e-5)
    torch.nn.init.normal_(module.weight)
    x = leaf(2, 7, 32, scale=scale)
    assert_same_values_and_gradients([rms_norm(x, module.weight, 1e-5)], [module(x)], [x, module.weight])


def test_eps_is_inside_the_root_and_counts_at_small_scale():
    # mean square 9e-6, eps 1e-5: 3e-3 / sqrt(1.9e-5)
    found = rms_norm(torch.full((1, 4), 3e-3), torch.ones(4), 1e-5)
    torch.testing.assert_close(found, torch.full((1, 4), 0.6882472), rtol=1e-6, atol=0)


def test_bf16_is_rounded_before_the_weight_multiplies(hf):
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    module = hf.Glm5NextTextRMSNorm(32, eps=1e-5).bfloat16()
    module.weight.data.copy_(weight)
    found = rms_norm(x, weight, 1e-5)
    rounded_once = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight).bfloat16()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, module(x))
    assert not torch.equal(found, rounded_once)


def test_fp32_weight_leaves_the_dtype_of_the_activations():
    assert rms_norm(torch.randn(2, 8).bfloat16(), torch.ones(8), 1e-5).dtype == torch.bfloat16


def test_weight_of_another_width_is_refused():
    with pytest.raises(ShapeError, match=r"rms_norm: weight has shape \[4\]; needed: \[h\] = \[8\]"):
        rms_norm(torch.ones(2, 8), torch.ones(4), 1e-5)
