"""How near the routers and indexers of a run came to choosing otherwise: below the noise, parity means nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def recording(enabled: bool) -> Iterator[dict[str, float]]:
    """Watch every choice made inside the block; afterwards the dict holds the smallest gap, relative to the scores.

    ``router``: between the last chosen and the first rejected expert. ``indexer``: between the last chosen and the
    first rejected pool. ``inf`` where nothing was rejected.
    """
    smallest = {"router": float("inf"), "indexer": float("inf")}
    if not enabled:
        yield smallest
        return
    from glm5next_plugin.adapters.megatron import indexer, router

    select_experts, select_pools = router.select_experts, indexer.select_pools

    def experts(scores, top_k):
        ordered = scores.detach().double().sort(dim=-1, descending=True).values
        gap = (ordered[:, top_k - 1] - ordered[:, top_k]) / ordered[:, top_k - 1].abs()
        smallest["router"] = min(smallest["router"], gap.min().item())
        return select_experts(scores, top_k)

    def pools(q, pooled, weights, cu_seqlens, cu_pools, kpool, topk, places=None):
        assert places is None, "margins are read in one process"
        q64, pooled64, weights64 = q.double(), pooled.double(), weights.double()
        for document, start in enumerate(cu_seqlens[:-1].tolist()):
            end, first = int(cu_seqlens[document + 1]), int(cu_pools[document])
            for token in range(start, end):
                finished = (token - start + 1) // kpool
                if finished > topk // kpool:
                    products = torch.relu(q64[token] @ pooled64[first : first + finished].T * q.shape[-1] ** -0.5)
                    ordered = (weights64[token] @ products).sort(descending=True).values
                    last, rejected = ordered[topk // kpool - 1], ordered[topk // kpool]
                    gap = ((last - rejected) / ordered.abs().max()).item()
                    smallest["indexer"] = min(smallest["indexer"], gap)
        return select_pools(q, pooled, weights, cu_seqlens, cu_pools, kpool, topk)

    router.select_experts, indexer.select_pools = experts, pools
    try:
        yield smallest
    finally:
        router.select_experts, indexer.select_pools = select_experts, select_pools
