import pytest
import torch

from glm5next_plugin.ops.swiglu import clamped_swiglu
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import assert_same_values_and_gradients, leaf


def test_matches_transformers_with_pre_activations_of_fifty(hf, hf_config):
    experts = hf.Glm5NextTextExperts(hf_config(swiglu_limit=10.0))
    gate_up = leaf(40, 48, scale=50)
    assert (gate_up.abs() > 10).float().mean() > 0.5
    assert_same_values_and_gradients([clamped_swiglu(gate_up, 10.0)], [experts._apply_gate(gate_up)], [gate_up])


def test_gate_has_no_lower_bound_and_up_has_both():
    # gate 50 -> 10; gate -50 stays: silu(-50) = -9.6e-21, while silu(-10) would be -4.5e-4
    gate_up = torch.tensor([[50.0, -50.0, 1.0, 1.0, 2.0, 50.0, 50.0, -50.0]])
    silu_of_one = 0.7310586
    expected = torch.tensor([[20.0 * 0.9999546, 0.0, 10 * silu_of_one, -10 * silu_of_one]])
    torch.testing.assert_close(clamped_swiglu(gate_up, 10.0), expected, rtol=1e-6, atol=1e-18)


def test_gradient_is_zero_outside_the_clamp():
    gate_up = torch.tensor([[50.0, -50.0, 3.0, 3.0, 2.0, 2.0, 50.0, -50.0]], requires_grad=True)
    clamped_swiglu(gate_up, 10.0).sum().backward()
    outside = torch.tensor([[True, False, False, False, False, False, True, True]])
    assert (gate_up.grad[outside] == 0).all()
    assert (gate_up.grad[0, [2, 3, 4]] != 0).all()


def test_bf16_rounds_as_transformers(hf, hf_config):
    gate_up = (torch.randn(64, 48) * 6).bfloat16()
    found = clamped_swiglu(gate_up, 10.0)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, hf.Glm5NextTextExperts(hf_config())._apply_gate(gate_up))


@pytest.mark.parametrize(
    ("width", "limit", "message"), [(5, 10.0, "5 columns"), (4, 0.0, "limit is 0.0; needed: a pos")]
)
def test_odd_width_and_zero_limit_are_refused(width, limit, message):
    with pytest.raises(ShapeError, match=message):
        clamped_swiglu(torch.ones(1, width), limit)
