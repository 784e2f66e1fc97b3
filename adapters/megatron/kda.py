"""Kimi Delta Attention with its heads split over tensor parallel and context parallel ranks."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from glm5next_plugin.ops.kda import kda, kda_gate
from glm5next_plugin.ops.short_conv import short_conv

from .float32 import KeepsFloat32
from .head_exchange import HeadExchange
from .linear import ReplicatedLinear
from .norm import GatedRMSNorm
from .packing import PackedTokens, from_packed, to_packed
from .parameters import mark_split, parameter_device, sharded_split_parameters


class ShortConvolution(MegatronModule):
    """Weight of one depthwise causal convolution, ``[channels / tp, 1, width]``, computed by ``ops.short_conv``."""

    def __init__(self, config: TransformerConfig, channels: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config=config)
        self.tp_group = tp_group
        device = parameter_device(config)
        width = config.architecture.short_conv_kernel_size
        self.weight = torch.nn.Parameter(
            torch.empty(channels // tp_group.size(), 1, width, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            torch.nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        mark_split(self.weight)

    def forward(self, rows: torch.Tensor, cu_seqlens: torch.Tensor, channels: slice) -> torch.Tensor:
        """Convolve and activate packed rows ``[T, channels]`` with these channels of the weight."""
        return short_conv(rows, self.weight[channels], cu_seqlens)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Axis 0 of the weight is split over TP."""
        return sharded_split_parameters(self, ("weight",), prefix, sharded_offsets, metadata)


class KimiDeltaAttention(KeepsFloat32, MegatronModule):
    """Linear attention with a per-channel decay and the delta rule (``ops.kda``), a rank's share of the heads.

    Under context parallel a rank projects its own tokens, then swaps them for all tokens of ``1 / cp`` of its heads
    (:class:`.HeadExchange`): convolution and recurrence see whole documents. Every rank keeps the parameters of all
    heads of its TP rank, of which it uses its share.

    The projections have stock parallel classes and the table in :mod:`.bridge` gives their names on disk. ``A_log``
    ``[heads / tp]`` and ``dt_bias`` ``[heads * head_dim / tp]`` are always fp32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        **kwargs,
    ):
        super().__init__(config=config)
        a = config.architecture
        self.layer_number = layer_number
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        tp = self.tp_group.size()
        self.local_heads, self.head_dim = a.kda_num_heads // tp, a.kda_head_dim

        def column(input_size: int, output_size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                input_size,
                output_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=self.tp_group,
            )

        self.linear_q = column(config.hidden_size, a.kda_width)
        self.linear_k = column(config.hidden_size, a.kda_width)
        self.linear_v = column(config.hidden_size, a.kda_width)
        self.linear_beta = column(config.hidden_size, a.kda_num_heads)
        self.linear_f_a = ReplicatedLinear(config.hidden_size, a.kda_head_dim, config=config)
        self.linear_f_b = column(a.kda_head_dim, a.kda_width)
        self.linear_g_a = ReplicatedLinear(config.hidden_size, a.kda_head_dim, config=config)
        self.linear_g_b = column(a.kda_head_dim, a.kda_width)
        self.q_conv1d = ShortConvolution(config, a.kda_width, self.tp_group)
        self.k_conv1d = ShortConvolution(config, a.kda_width, self.tp_group)
        self.v_conv1d = ShortConvolution(config, a.kda_width, self.tp_group)

        device = parameter_device(config)
        self.A_log = torch.nn.Parameter(torch.zeros(self.local_heads, dtype=torch.float32, device=device))
        self.dt_bias = torch.nn.Parameter(
            torch.zeros(self.local_heads * self.head_dim, dtype=torch.float32, device=device)
        )
        for parameter in (self.A_log, self.dt_bias):
            mark_split(parameter)
        self.keep_float32("A_log", "dt_bias")
        self.o_norm = GatedRMSNorm(config, self.head_dim, a.rms_norm_eps)
        self.linear_proj = RowParallelLinear(
            a.kda_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (``s / tp`` under sequence parallel) to the same shape; there is no bias."""

        def project(linear, x):
            return to_packed(linear(x)[0]).unflatten(-1, (self.local_heads, -1))

        projections = [project(linear, hidden_states) for linear in (self.linear_q, self.linear_k, self.linear_v)]
        projections += [
            project(self.linear_f_b, self.linear_f_a(hidden_states)),
            project(self.linear_beta, hidden_states),
        ]
        gate = project(self.linear_g_b, self.linear_g_a(hidden_states))

        batch = hidden_states.shape[1]
        tokens = PackedTokens.of(packed_seq_params, gate.shape[0] // batch, batch, gate.device, self.cp_group)
        exchange = HeadExchange(tokens, self.local_heads)
        mine = exchange.to_heads(torch.cat(projections, dim=-1))
        q, k, v, raw_decay, beta = mine.split([self.head_dim] * 4 + [1], dim=-1)
        channels = slice(exchange.mine.start * self.head_dim, exchange.mine.stop * self.head_dim)
        q, k, v = (
            conv(rows.flatten(-2), tokens.cu_seqlens, channels).view(-1, exchange.heads, self.head_dim)
            for conv, rows in ((self.q_conv1d, q), (self.k_conv1d, k), (self.v_conv1d, v))
        )
        log_decay = kda_gate(
            raw_decay, self.A_log[exchange.mine], self.dt_bias[channels], self.config.architecture.gate_lower_bound
        )
        output, _ = kda(q, k, v, log_decay, torch.sigmoid(beta.squeeze(-1).float()), tokens.cu_seqlens)
        output = self.o_norm(exchange.to_tokens(output), gate).flatten(-2)
        return self.linear_proj(from_packed(output, batch))[0], None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The default for the sub-modules; the module's own parameters are split along axis 0."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.update(sharded_split_parameters(self, ("A_log", "dt_bias"), prefix, sharded_offsets, metadata))
        return state
