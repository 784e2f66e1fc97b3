"""NoPE multi-latent attention over the pools that a lightning indexer selects."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from glm5next_plugin.ops.sparse_attention import sparse_mla

from .indexer import PooledIndexer
from .linear import ReplicatedLinear
from .norm import RMSNorm
from .packing import PackedTokens, from_packed, to_packed
from .replay import replay_of


class SparseLatentAttention(MegatronModule):
    """DSA layer: latents, indexer, attention over the selected keys (``ops.sparse_attention``), a rank's heads.

    The operator takes the query heads, the latents and ``linear_kv_up_proj``'s weight and decides itself whether keys
    and values are expanded or absorbed; so this module is no subclass of the stock absorbed MLA, which fixes that.
    Under context parallel the latents of all ranks are gathered, and each rank asks for its own tokens.
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
        self.local_heads = a.num_attention_heads // self.tp_group.size()

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

        self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, a.q_lora_rank, config=config)
        self.q_layernorm = RMSNorm(config, a.q_lora_rank, a.rms_norm_eps)
        self.linear_q_up_proj = column(a.q_lora_rank, a.num_attention_heads * a.qk_head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, a.kv_lora_rank, config=config)
        self.kv_layernorm = RMSNorm(config, a.kv_lora_rank, a.rms_norm_eps)
        self.linear_kv_up_proj = column(a.kv_lora_rank, a.num_attention_heads * (a.qk_head_dim + a.v_head_dim))
        self.indexer = PooledIndexer(config, self.tp_group)
        self.linear_proj = RowParallelLinear(
            a.num_attention_heads * a.v_head_dim,
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
        a = self.config.architecture
        batch = hidden_states.shape[1]
        query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        query = to_packed(self.linear_q_up_proj(query_latent)[0])
        kv_latent = self.kv_layernorm(self.linear_kv_down_proj(hidden_states))
        if self.config.sequence_parallel:
            # each rank attends with its own heads: gradients of the latents are partial sums over TP
            kv_latent = gather_from_sequence_parallel_region(kv_latent, group=self.tp_group)
        tokens = PackedTokens.of(packed_seq_params, query.shape[0] // batch, batch, query.device, self.cp_group)
        replay = replay_of(packed_seq_params)
        if replay is None:
            pool_ids = self.indexer(hidden_states, query_latent, tokens)
        else:
            pool_ids = replay.choose(
                "indexer",
                self.layer_number - 1,
                tokens.places,
                lambda: self.indexer(hidden_states, query_latent, tokens),
            )
        output, _ = sparse_mla(
            query.view(-1, self.local_heads, a.qk_head_dim),
            tokens.gather(to_packed(kv_latent)),
            self.linear_kv_up_proj.weight.view(self.local_heads, a.qk_head_dim + a.v_head_dim, a.kv_lora_rank),
            pool_ids,
            tokens.cu_seqlens,
            a.index_kpool,
            a.softmax_scale,
            tokens.places,
        )
        return self.linear_proj(from_packed(output.flatten(-2), batch))[0], None
