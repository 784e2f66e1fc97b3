"""Clamped SwiGLU MLPs: dense, shared and routed."""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from glm5next_plugin.ops.experts import pad_few_rows
from glm5next_plugin.ops.swiglu import clamped_swiglu


def _clamped_forward(mlp: MLP, hidden_states: torch.Tensor, limit: float) -> torch.Tensor:
    gate_up, _ = mlp.linear_fc1(hidden_states)
    output, _ = mlp.linear_fc2(clamped_swiglu(gate_up, limit))
    return output


class ClampedMLP(MLP):
    """The stock MLP with the clamped SwiGLU of ``ops.swiglu`` on its only path (fused paths drop the clamp)."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` to ``[s, b, h]``; there is no bias."""
        return _clamped_forward(self, hidden_states, self.config.architecture.swiglu_limit), None


class ClampedSharedExpertMLP(SharedExpertMLP, ClampedMLP):
    """The stock shared expert; its forward goes through :class:`ClampedMLP`."""


class ClampedExperts(SequentialMLP):
    """The stock per-expert MLPs, clamped, with the routing weight applied after ``linear_fc2``.

    megatron-core applies the weight before ``linear_fc2``; transformers and SGLang after it, which rounds elsewhere.
    """

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Tokens sorted by local expert ``[n, h]``, their counts and weights ``[n]`` to ``[n, h]``.

        An expert without tokens takes part with an empty slice, so that its weights get a zero gradient.
        """
        limit = self.config.architecture.swiglu_limit
        counts = tokens_per_expert.tolist()
        outputs = [
            (_clamped_forward(expert, pad_few_rows(tokens), limit)[: len(tokens)] * probs.unsqueeze(-1)).to(
                tokens.dtype
            )
            for expert, tokens, probs in zip(
                self.local_experts,
                torch.split(permuted_local_hidden_states, counts),
                torch.split(permuted_probs, counts),
                strict=True,
            )
        ]
        return torch.cat(outputs), None
