import pytest
import torch

from glm5next_plugin.ops.experts import experts
from glm5next_plugin.ops.router import route
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import assert_same_values_and_gradients, gradients, leaf, randomise, relative_error

COUNT, HIDDEN, INNER, LIMIT = 16, 48, 23, 10.0


def _routing(tokens, count=COUNT, top_k=4):
    return route(torch.randn(tokens, count), torch.zeros(count), top_k, 2.5)


def _weights(count=COUNT):
    return leaf(count, 2 * INNER, HIDDEN, scale=0.3), leaf(count, HIDDEN, INNER, scale=0.3)


@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_matches_transformers(hf, hf_config, tokens, scale):
    module = randomise(hf.Glm5NextTextExperts(hf_config(swiglu_limit=LIMIT)))
    x = leaf(tokens, HIDDEN, scale=scale)
    probs, ids = _routing(tokens)
    probs.requires_grad_()
    inputs = [x, probs, module.gate_up_proj, module.down_proj]
    found = experts(x, probs, ids, module.gate_up_proj, module.down_proj, LIMIT)
    assert_same_values_and_gradients([found], [module(x, ids, probs)], inputs)


def test_clamp_acts_and_stops_the_gradient():
    x, (gate_up, down) = torch.ones(1, HIDDEN), _weights(2)
    with torch.no_grad():
        gate_up[0] = 50.0 / HIDDEN
    out = experts(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), gate_up, down, LIMIT)
    torch.testing.assert_close(out[0], 10 * 9.999546 * down[0].sum(1), rtol=1e-4, atol=1e-3)
    (gradient,) = torch.autograd.grad(out.sum(), gate_up)
    assert (gradient == 0).all()


def test_expert_without_tokens_has_zero_gradient():
    x, (gate_up, down) = leaf(6, HIDDEN), _weights()
    ids = torch.tensor([[3, 5]] * 6)
    out = experts(x, torch.full((6, 2), 0.5), ids, gate_up, down, LIMIT)
    unused = [expert for expert in range(COUNT) if expert not in (3, 5)]
    for gradient in gradients([out], [gate_up, down]):
        assert (gradient[unused] == 0).all()
        assert (gradient[[3, 5]] != 0).any()


def test_no_tokens_give_no_rows_and_zero_gradients():
    x, (gate_up, down) = leaf(0, HIDDEN), _weights()
    out = experts(x, torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int64), gate_up, down, LIMIT)
    assert out.shape == (0, HIDDEN)
    for gradient in torch.autograd.grad(out.sum(), [gate_up, down]):
        assert (gradient == 0).all()


def test_expert_ids_above_a_byte_reach_their_expert():
    x, (gate_up, down) = torch.randn(5, HIDDEN), _weights(300)
    out = experts(x, torch.ones(5, 1), torch.full((5, 1), 299), gate_up, down, LIMIT)
    only = experts(x, torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64), gate_up[299:], down[299:], LIMIT)
    assert torch.equal(out, only)
    byte = experts(x, torch.ones(5, 1), torch.full((5, 1), 299 - 256), gate_up, down, LIMIT)
    assert relative_error(byte, out) > 0.1


def test_weight_applies_after_the_down_projection():
    """bf16 tells the places apart: 30 * 1.03125 rounds to 31, times 0.7 to 21.75; but 0.7 * 30 * 1.03125 to 21.625."""
    gate_up = torch.tensor([[[10.0], [3.0]]]).bfloat16()  # silu(10) rounds to 10
    down, x = torch.tensor([[[1.03125]]]).bfloat16(), torch.ones(1, 1).bfloat16()
    found = experts(x, torch.tensor([[0.7]]), torch.zeros(1, 1, dtype=torch.int64), gate_up, down, LIMIT)
    assert found.dtype == torch.bfloat16
    assert found.item() == 21.75


def test_sum_over_experts_is_rounded_once():
    x, (gate_up, down) = torch.randn(40, HIDDEN).bfloat16(), (w.detach().bfloat16() for w in _weights())
    probs, ids = _routing(40)
    single = sum(
        experts(x, torch.ones(40, 1), ids[:, j : j + 1], gate_up, down, LIMIT).float() * probs[:, j : j + 1]
        for j in range(4)
    )
    assert torch.equal(experts(x, probs, ids, gate_up, down, LIMIT), single.bfloat16())


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 9])
def test_tokens_keep_every_bit_whatever_the_others_choose(tokens):
    """Alone with its expert or in a crowd: the same bits, gradient included."""
    (gate_up, down), x = _weights(4), torch.randn(40, HIDDEN)
    probs = torch.rand(40, 1)

    def run(ids):
        rows = x.clone().requires_grad_()
        out = experts(rows, probs, ids, gate_up, down, LIMIT)
        cotangent = torch.cos(torch.arange(out.numel()) * 0.7).view_as(out)
        return out[:tokens], torch.autograd.grad(out, rows, cotangent)[0][:tokens]

    alone = torch.ones(40, 1, dtype=torch.int64)
    alone[:tokens] = 0
    crowd = torch.zeros(40, 1, dtype=torch.int64)
    for a, b in zip(run(alone), run(crowd), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("expert", [-1, COUNT, 300])
def test_expert_that_does_not_exist_is_refused(expert):
    ids = torch.zeros(3, 2, dtype=torch.int64)
    ids[1, 1] = expert
    with pytest.raises(ShapeError, match=f"experts: expert id {expert}; needed: 0 to {COUNT - 1}"):
        experts(torch.zeros(3, HIDDEN), torch.zeros(3, 2), ids, *_weights(), LIMIT)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("expert_ids", torch.zeros(3, 2, dtype=torch.int32), "expert_ids is torch.int32; needed: torch.int64"),
        ("gate_up", torch.zeros(COUNT, 2 * INNER + 2, HIDDEN), r"gate_up has 48 rows; needed: 2 \* I = 46"),
        ("down", torch.zeros(COUNT, HIDDEN + 1, INNER), r"down has shape .*; needed: .* = \[16, 48, any\]"),
    ],
)
def test_wrong_arguments_are_refused(name, wrong, message):
    gate_up, down = _weights()
    arguments = dict(
        x=torch.zeros(3, HIDDEN),
        probs=torch.zeros(3, 2),
        expert_ids=torch.zeros(3, 2, dtype=torch.int64),
        gate_up=gate_up,
        down=down,
        limit=LIMIT,
    )
    with pytest.raises(ShapeError, match=message):
        experts(**(arguments | {name: wrong}))
