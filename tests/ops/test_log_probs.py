import pytest
import torch

from glm5next_plugin.ops.log_probs import token_log_probs
from glm5next_plugin.ops.validation import ShapeError


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_matches_log_softmax_in_fp64(temperature):
    logits, targets = (torch.randn(9, 33) * 8).requires_grad_(), torch.randint(33, (9,))
    found = token_log_probs(logits, targets, temperature)
    wide = torch.log_softmax(logits.double() / temperature, dim=-1)
    expected = wide.gather(1, targets.unsqueeze(1)).squeeze(1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    (a,), (b,) = (torch.autograd.grad(x.sum(), logits) for x in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_temperature_divides_the_logits():
    # logits (0, ln 3) at T = 0.5 are (0, ln 9): probabilities 1/10 and 9/10
    logits = torch.tensor([[0.0, 1.0986123], [0.0, 1.0986123]])
    found = token_log_probs(logits, torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(found.exp(), torch.tensor([0.1, 0.9]))


def test_padded_vocabulary_takes_no_part():
    logits = torch.tensor([[0.0, 0.0, 80.0, float("nan")]], requires_grad=True)
    found = token_log_probs(logits, torch.tensor([1]), temperature=0.7, vocab_size=2)
    torch.testing.assert_close(found, torch.tensor([-0.6931472]))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5, 0.5, 0.0, 0.0]]) / 0.7)


def test_bf16_logits_are_widened_before_the_division():
    logits, targets = (torch.randn(9, 33) * 8).bfloat16(), torch.randint(33, (9,))
    assert torch.equal(token_log_probs(logits, targets, 0.7), token_log_probs(logits.float(), targets, 0.7))


def test_strong_logits_do_not_overflow():
    found = token_log_probs(torch.tensor([[3e4, -3e4]]), torch.tensor([1]))
    assert found.tolist() == [-6e4]


@pytest.mark.parametrize("target", [-1, 5, 7])
def test_target_outside_the_vocabulary_is_refused(target):
    with pytest.raises(ShapeError, match=f"target {target} at 1; needed: 0 to 4"):
        token_log_probs(torch.zeros(2, 8), torch.tensor([0, target]), vocab_size=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(temperature=0.0), "temperature is 0.0; needed: a positive number"),
        (dict(vocab_size=9), "vocab_size is 9; needed: 1 to the 8 columns"),
        (dict(targets=torch.zeros(3, dtype=torch.int64)), r"targets has shape \[3\]; needed: \[T\] = \[2\]"),
        (dict(targets=torch.zeros(2, dtype=torch.int32)), "targets is torch.int32; needed: torch.int64"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    arguments = dict(logits=torch.zeros(2, 8), targets=torch.zeros(2, dtype=torch.int64)) | changes
    with pytest.raises(ShapeError, match=message):
        token_log_probs(**arguments)
