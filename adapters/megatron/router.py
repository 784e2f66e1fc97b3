"""The router: fp32 sigmoid scores, a bias that only chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter

from glm5next_plugin.ops.router import expert_weights, router_logits, scores_for_choice, select_experts

from .float32 import KeepsFloat32
from .packing import PackedTokens
from .replay import Replay


class SigmoidRouter(KeepsFloat32, TopKRouter):
    """The stock TopKRouter with the maths of ``ops.router``.

    It stays a TopKRouter because RouterReplay and the frameworks on top of it look for one. Logits, scores and weights
    are fp32 whatever the model's dtype; ``expert_bias`` keeps its bits through every cast; ties go to the lower expert.
    A replayed choice takes its weight from the current scores, so gradients flow.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.keep_float32("expert_bias")
        self._replay: tuple[Replay, int, PackedSeqParams] | None = None

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[s, b, h]`` to fp32 logits ``[s, b, experts]``."""
        return router_logits(input, self.weight)

    @contextlib.contextmanager
    def replaying(self, replay: Replay, layer: int, packed_seq_params: PackedSeqParams) -> Iterator[None]:
        """Choose through ``replay`` inside the block, as ``layer`` (0-based)."""
        self._replay = (replay, layer, packed_seq_params)
        try:
            yield
        finally:
            self._replay = None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[s, b, experts]`` to weights and choice, both ``[s * b, experts]`` (fp32, bool)."""
        logits = logits.reshape(-1, self.num_experts)
        architecture = self.config.architecture
        choice_scores = scores_for_choice(logits, self.expert_bias)

        def choose(scores, top_k, num_groups=None, group_topk=None):
            expert_ids = select_experts(scores, top_k)
            return scores.gather(1, expert_ids), expert_ids

        def select():
            if self.router_replay is None:
                return choose(choice_scores, self.topk)[1]
            return self.router_replay.get_replay_topk(choice_scores, self.topk, None, None, choose)[1]

        if self._replay is None:
            expert_ids = select()
        else:
            replay, layer, packed_seq_params = self._replay
            tokens = PackedTokens.of(
                packed_seq_params, logits.shape[0] * self.tp_group.size(), 1, logits.device, self.cp_group
            )
            expert_ids = replay.choose("routing", layer, tokens.places_of_shard(self.tp_group), select)
        weights = expert_weights(
            logits, expert_ids, architecture.routed_scaling_factor, normalise=architecture.norm_topk_prob
        )
        probs = torch.zeros_like(logits).scatter(1, expert_ids, weights)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_ids, True)
        return probs, routing_map
