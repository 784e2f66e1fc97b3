"""Matrix products in true float32 for the parts of the model where TF32 or bf16 changes decisions.

The hyper-connections, the router and the indexer need them (a routing bias near 7 leaves few bits for the score).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def ieee_float32(device: torch.device) -> Iterator[None]:
    """Within it, float32 matrix products neither round their inputs (TF32, bf16) nor follow an outer autocast.

    Global settings of torch change and are put back; not for several threads that multiply at the same time.
    """
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


class _MatMul(torch.autograd.Function):
    """The backward pass runs outside the caller's context, so it needs its own."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        with ieee_float32(a.device):
            return torch.matmul(a.float(), b.float())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        with ieee_float32(grad.device):
            if ctx.needs_input_grad[0]:
                grad_a = torch.matmul(grad, b.float().mT).to(a.dtype)
            if ctx.needs_input_grad[1]:
                grad_b = torch.matmul(a.float().mT, grad).to(b.dtype)
        return grad_a, grad_b


def matmul_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [..., M, K] @ b [..., K, N]`` in fp32, forward and backward; gradients have the inputs' dtypes.

    Leading dimensions are those of both: nothing is broadcast.
    """
    return _MatMul.apply(a, b)


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [..., K] @ weight [M, K]^T``, as :func:`matmul_float32`."""
    return matmul_float32(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])
