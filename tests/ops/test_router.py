import pytest
import torch

from glm5next_plugin.ops.router import expert_weights, route, router_logits, scores_for_choice, select_experts
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import assert_same_values_and_gradients, leaf, randomise


@pytest.mark.parametrize("normalise", [True, False])
def test_matches_transformers(hf, hf_config, normalise):
    config = hf_config(norm_topk_prob=normalise, routed_scaling_factor=2.5)
    router = randomise(hf.Glm5NextTextTopkRouter(config))
    x = leaf(50, config.hidden_size)
    logits = router_logits(x, router.weight)
    found, found_ids = route(logits, router.e_score_correction_bias, 4, 2.5, normalise)
    expected_logits, expected, expected_ids = router(x)
    assert found.dtype == torch.float32 and found_ids.dtype == torch.int64
    assert torch.equal(found_ids.sort(-1).values, expected_ids.sort(-1).values)
    by_expert = [torch.zeros_like(logits).scatter(1, *pair) for pair in ((found_ids, found), (expected_ids, expected))]
    assert_same_values_and_gradients([logits, by_expert[0]], [expected_logits, by_expert[1]], [x, router.weight])


def test_bias_near_seven_routes_as_fp64():
    """Biases like the release's: the score has 21 bits left in fp32, and none to speak of in bf16."""
    logits, bias = torch.randn(2000, 288), 7 + 0.02 * torch.randn(288)
    _, ids = route(logits, bias, 8, 2.5)
    exact = torch.sigmoid(logits.double()) + bias.double()
    best = exact.sort(-1, descending=True)
    clear = best.values[:, 7] - best.values[:, 8] > 2e-6
    assert clear.float().mean() > 0.99
    assert torch.equal(ids[clear].sort(-1).values, best.indices[clear, :8].sort(-1).values)
    in_bf16 = select_experts(torch.sigmoid(logits).bfloat16() + bias.bfloat16(), 8)
    assert (in_bf16.sort(-1).values != ids.sort(-1).values).any(-1).float().mean() > 0.5


def test_bias_chooses_and_does_not_weigh():
    # sigmoids 1/2, 3/4, 1/4; the bias lifts expert 2 over expert 0
    logits, bias = torch.tensor([[0.0, 1.0986123, -1.0986123]]), torch.tensor([7.0, 7.0, 7.5])
    weights, ids = route(logits, bias, 2, 2.5)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2.5 * 0.75, 2.5 * 0.25]]))


def test_ties_go_to_the_lower_expert():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6])
    _, ids = route(logits, torch.full((6,), 7.0), 4, 1.0)
    assert ids.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_many_equal_experts_still_go_to_the_lowest_ids():
    """Sorting networks and radix sorts show their order only on long rows."""
    ids = select_experts(torch.ones(64, 288), 8)
    assert torch.equal(ids, torch.arange(8).expand(64, 8))


def test_replayed_experts_take_their_weight_and_gradient_from_the_current_logits():
    logits = torch.tensor([[0.0, 1.0986123, -1.0986123]], requires_grad=True)
    weights = expert_weights(logits, torch.tensor([[2, 0]]), 3.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0]]))
    (gradient,) = torch.autograd.grad(weights[0, 0], logits)
    assert gradient[0, 1] == 0 and gradient[0, 0] < 0 < gradient[0, 2]


def test_vanishing_scores_give_finite_weights():
    weights, _ = route(torch.full((1, 4), -300.0), torch.zeros(4), 2, 2.5)
    assert weights.tolist() == [[0.0, 0.0]]


def test_logits_of_bf16_tensors_are_computed_in_fp32():
    x, weight = torch.randn(20, 48).bfloat16(), torch.randn(16, 48).bfloat16()
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)
    assert (logits != logits.bfloat16()).any()


def test_scores_are_the_sigmoid_plus_the_bias():
    scores = scores_for_choice(torch.tensor([[0.0, 1.0986123]]), torch.tensor([7.0, -1.0]))
    torch.testing.assert_close(scores, torch.tensor([[7.5, -0.25]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(logits=torch.zeros(5, 8).bfloat16()), "logits is torch.bfloat16; needed: torch.float32"),
        (dict(expert_bias=torch.zeros(8).bfloat16()), "expert_bias is torch.bfloat16; needed: torch.float32"),
        (dict(expert_bias=torch.zeros(7)), r"expert_bias has shape \[7\]; needed: \[E\] = \[8\]"),
        (dict(top_k=9), r"top_k is 9; needed: 1 to the number of experts \(8\)"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    arguments = dict(logits=torch.zeros(5, 8), expert_bias=torch.zeros(8), top_k=2, scaling=2.5)
    with pytest.raises(ShapeError, match="route: " + message):
        route(**(arguments | changes))
