import pytest
import torch

from glm5next_plugin.ops.gated_rms_norm import gated_rms_norm
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import assert_same_values_and_gradients, leaf


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_matches_transformers(hf, scale):
    module = hf.Glm5NextTextRMSNormGated(8, eps=1e-5)
    torch.nn.init.normal_(module.weight)
    x, gate = leaf(11, 3, 8, scale=scale), leaf(11, 3, 8, scale=4)
    assert_same_values_and_gradients(
        [gated_rms_norm(x, gate, module.weight, 1e-5)], [module(x, gate)], [x, gate, module.weight]
    )


def test_gate_is_a_sigmoid_not_a_silu():
    found = gated_rms_norm(torch.ones(1, 4), torch.tensor([[0.0, 2.0, -2.0, 50.0]]), torch.ones(4), 0.0)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.8807971, 0.1192029, 1.0]]))


def test_bf16_is_rounded_once_at_the_end(hf):
    x, gate, weight = (torch.randn(64, 8).bfloat16() for _ in range(3))
    module = hf.Glm5NextTextRMSNormGated(8, eps=1e-5).bfloat16()
    module.weight.data.copy_(weight[0])
    found = gated_rms_norm(x, gate, weight[0], 1e-5)
    in_fp32 = gated_rms_norm(x.float(), gate.float(), weight[0].float(), 1e-5)
    assert torch.equal(found, in_fp32.bfloat16())
    assert torch.equal(found, module(x, gate))


def test_gate_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"gated_rms_norm: gate has shape \[2, 8\]; needed: .* = \[2, 3, 8\]"):
        gated_rms_norm(torch.ones(2, 3, 8), torch.ones(2, 8), torch.ones(8), 1e-5)
