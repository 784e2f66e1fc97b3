"""The lightning indexer: which pools of keys each query attends to."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from glm5next_plugin.ops.indexer import key_norm, pool_keys, select_pools

from .linear import ReplicatedLinear
from .packing import PackedTokens, from_packed, to_packed
from .parameters import parameter_device


class KeyNorm(torch.nn.Module):
    """LayerNorm of the indexer's keys (``ops.indexer.key_norm``)."""

    def __init__(self, width: int, **factory):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, **factory))
        self.bias = torch.nn.Parameter(torch.zeros(width, **factory))

    def forward(self, key: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same."""
        return key_norm(key, self.weight, self.bias)


class PooledIndexer(MegatronModule):
    """Scores pools of ``index_kpool`` keys and selects the best (``ops.indexer``). Frozen: it never gets a gradient.

    Replicated over TP; parameters have the disk's names.
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config=config)
        a = config.architecture
        self.tp_group = tp_group
        device = parameter_device(config)
        factory = dict(dtype=config.params_dtype, device=device)
        self.wq_b = ReplicatedLinear(a.q_lora_rank, a.index_n_heads * a.index_head_dim, config=config)
        self.wk = ReplicatedLinear(config.hidden_size, a.index_head_dim, config=config)
        self.weights_proj = ReplicatedLinear(config.hidden_size, a.index_n_heads, config=config)
        self.k_norm = KeyNorm(a.index_head_dim, **factory)
        self.index_kpool_compress_gate = torch.nn.Parameter(
            torch.empty(a.index_head_dim, config.hidden_size, **factory)
        )
        self.index_kpool_compress_ape = torch.nn.Parameter(torch.zeros(a.index_kpool, a.index_head_dim, **factory))
        if config.perform_initialization:
            config.init_method(self.index_kpool_compress_gate)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, query_latent: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """Select pools for every query of this rank.

        Keys are pooled over whole documents, so every rank sees the keys of all; it scores the queries of its own
        shard only, and tensor parallel ranks tell each other what they selected.

        Args:
            hidden_states: ``[s, b, h]`` (``s / tp`` under sequence parallel).
            query_latent: the *normalised* query latent ``[s, b, q_lora_rank]``, split like ``hidden_states``.
            tokens: where the ``b * s`` tokens of this rank stand.

        Returns:
            int32 ``[b * s, index_topk / index_kpool]``: pools within the document, ascending, -1 behind the last.
        """
        a = self.config.architecture
        key = self.k_norm(self.wk(hidden_states))
        gate = torch.nn.functional.linear(hidden_states, self.index_kpool_compress_gate)
        key, gate = self._whole(torch.cat([key, gate], dim=-1), tokens).chunk(2, dim=-1)
        pooled, cu_pools = pool_keys(key, gate, self.index_kpool_compress_ape, tokens.cu_seqlens)
        query = to_packed(self.wq_b(query_latent))
        weights = to_packed(self.weights_proj(hidden_states))
        pool_ids = select_pools(
            query.view(-1, a.index_n_heads, a.index_head_dim),
            pooled,
            weights.float() * a.index_n_heads**-0.5,
            tokens.cu_seqlens,
            cu_pools,
            a.index_kpool,
            a.index_topk,
            tokens.places_of_shard(self.tp_group),
        )
        if not self.config.sequence_parallel:
            return pool_ids
        shard = from_packed(pool_ids, tokens.batch)
        return to_packed(gather_from_sequence_parallel_region(shard, group=self.tp_group))

    def _whole(self, rows: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """A shard's rows ``[s, b, c]`` to the packed rows of all ranks ``[T, c]``: first TP, then CP."""
        if self.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows, group=self.tp_group)
        return tokens.gather(to_packed(rows))
