"""One block: hyper-connections around attention and MLP."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from glm5next_plugin.ops.hyper_connection import hc_contract, hc_expand

from .hyper_connection import HyperConnection
from .replay import replay_of


class HyperConnectedLayer(TransformerLayer):
    """A TransformerLayer whose residual is ``hc_mult`` streams.

    What differs from the stock layer: two :class:`HyperConnection` modules replace the residual additions, and hidden
    states between layers (and between pipeline stages) are ``[s, b, hc_mult * h]``. The first layer of the model
    spreads the embedding over the streams, the last one returns their mean.
    """

    def __init__(self, config, submodules, *args, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        self.attn_hc = HyperConnection(config)
        self.ffn_hc = HyperConnection(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Streams ``[s, b, hc_mult * h]`` (embedding ``[s, b, h]`` in layer 1) to the same (mean in the last layer).

        Raises:
            ValueError: an attention mask or an inference context was given; documents are told by packed_seq_params,
                and generation belongs to the rollout engine.
        """
        if attention_mask is not None:
            raise ValueError(
                "attention_mask was given; needed: None. Attention is causal within each document, and documents are "
                "told apart by packed_seq_params"
            )
        if kwargs.get("inference_context") is not None:
            raise ValueError("inference_context was given; this model generates in a rollout engine, not in Megatron")
        streams = hidden_states
        if self.layer_number == 1:
            streams = hc_expand(hidden_states, self.attn_hc.streams).flatten(-2)

        collapsed, post, comb = self.attn_hc.collapse(streams)
        output, _ = self.self_attention(self.input_layernorm(collapsed), packed_seq_params=packed_seq_params)
        streams = self.attn_hc.spread(output, streams, post, comb)

        collapsed, post, comb = self.ffn_hc.collapse(streams)
        hidden_states = self.pre_mlp_layernorm(collapsed)
        replay = replay_of(packed_seq_params)
        if replay is None or not isinstance(self.mlp, MoELayer):
            output, _ = self.mlp(hidden_states, padding_mask=padding_mask)
        else:
            with self.mlp.router.replaying(replay, self.layer_number - 1, packed_seq_params):
                output, _ = self.mlp(hidden_states, padding_mask=padding_mask)
        streams = self.ffn_hc.spread(output, streams, post, comb)

        if self.layer_number == self.config.num_layers:
            streams = hc_contract(streams.unflatten(-1, (self.ffn_hc.streams, self.config.hidden_size)))
        # the pipeline schedule frees what a stage has sent, which a view would outlive
        return make_viewless_tensor(streams, requires_grad=True, keep_graph=True), context
