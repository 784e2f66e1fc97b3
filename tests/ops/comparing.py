"""What the operator tests share: errors, gradients, documents."""

from collections.abc import Callable, Sequence

import torch

from glm5next_plugin.ops.packing import cumulative_lengths

# around the multiples of the pool (4 and 16), of the shrunk topk (16), and of the chunks of transformers (64)
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 18, 19, 20, 21, 63, 64, 65, 130)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Signed random numbers with a gradient."""
    return (torch.randn(*shape) * scale).requires_grad_()


def randomise(module: torch.nn.Module, scale: float = 0.3) -> torch.nn.Module:
    """Give every parameter and buffer signed random numbers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0, scale)
    return module


def gradients(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients of a fixed signed weighing of the outputs."""
    loss = sum((output * torch.cos(torch.arange(output.numel()) * 0.7).view_as(output)).sum() for output in outputs)
    return torch.autograd.grad(loss, inputs)


def assert_same_values_and_gradients(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    value_tolerance: float = 1e-5,
    gradient_tolerance: float = 1e-4,
) -> None:
    """Compare outputs, and their gradients by ``inputs``, in relative norm."""
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= value_tolerance
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert float(b.norm()) > 0
        assert relative_error(a, b) <= gradient_tolerance


def documents(cu_seqlens: torch.Tensor) -> list[slice]:
    """Where each document stands in the packed row."""
    bounds = cu_seqlens.tolist()
    return [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]


def packed(*lengths: int) -> torch.Tensor:
    """``cu_seqlens`` of documents of these lengths."""
    return cumulative_lengths(torch.tensor(lengths))


def assert_other_documents_keep_their_bits(
    operator: Callable[..., torch.Tensor], arguments: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, changed: int
) -> None:
    """Replace the tokens of one document in every argument: outputs and gradients of the others keep every bit.

    ``operator`` takes the arguments, all packed ``[T, ...]``, and returns one packed output.
    """
    where = documents(cu_seqlens)[changed]
    others = torch.ones(arguments[0].shape[0], dtype=torch.bool)
    others[where] = False

    def run(values):
        values = [value.detach().clone().requires_grad_() for value in values]
        output = operator(*values)
        cotangent = torch.cos(torch.arange(output.numel()) * 0.7).view_as(output)
        return output, torch.autograd.grad(output, values, cotangent)

    replaced = [value.detach().clone() for value in arguments]
    for value in replaced:
        value[where] = -1.5 * value[where] + 0.25
    before, gradients_before = run(arguments)
    after, gradients_after = run(replaced)
    assert not torch.equal(before[where], after[where])
    assert torch.equal(before[others], after[others])
    for a, b in zip(gradients_before, gradients_after, strict=True):
        assert torch.equal(a[others], b[others])


def assert_future_changes_nothing(
    operator: Callable[..., torch.Tensor], arguments: Sequence[torch.Tensor], position: int
) -> None:
    """Replace the tokens from ``position`` on in every argument: earlier outputs keep every bit."""
    replaced = [argument.detach().clone() for argument in arguments]
    for argument in replaced:
        argument[position:] = -1.5 * argument[position:] + 0.25
    before, after = operator(*arguments), operator(*replaced)
    assert not torch.equal(before[position:], after[position:])
    assert torch.equal(before[:position], after[:position])
