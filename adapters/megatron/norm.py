"""RMSNorm of the blocks, the latents and the final hidden states, and the gated RMSNorm of KDA."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from glm5next_plugin.ops.gated_rms_norm import gated_rms_norm
from glm5next_plugin.ops.rms_norm import rms_norm

from .parameters import mark_partial_gradient, parameter_device


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last axis, from ``ops.rms_norm``; replicated over TP.

    megatron-core's torch norm refuses sequence parallel: there every rank normalises its own tokens, so the gradient of
    the weight is a partial sum, which megatron-core adds up over TP for parameters marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        device = parameter_device(config)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        mark_partial_gradient(self.weight, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., hidden_size]``; same shape and dtype out."""
        return rms_norm(hidden_states, self.weight, self.eps)


class GatedRMSNorm(torch.nn.Module):
    """Per-head RMSNorm times a sigmoid gate (``ops.gated_rms_norm``); one weight ``[head_dim]`` for all heads.

    Each TP rank sees its own heads, so the weight's gradient is a partial sum over TP.
    """

    def __init__(self, config: TransformerConfig, head_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        device = parameter_device(config)
        self.weight = torch.nn.Parameter(torch.ones(head_dim, dtype=config.params_dtype, device=device))
        mark_partial_gradient(self.weight, config)

    def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``[T, heads, head_dim]`` and a gate of the same shape."""
        return gated_rms_norm(rows, gate, self.weight, self.eps)
