"""The pooled lightning indexer of DSA: which keys each query attends to.

Keys are pooled ``kpool`` at a time from the first token of each document. A query may attend to the ``topk / kpool``
pools that score highest among those whose last token it sees, and always to the unfinished pool at the end of what it
sees (``visible % kpool`` tokens). Nothing here has a gradient.

Packed forms: :func:`pool_keys`, :func:`select_pools`. Step forms, one new token a sequence over cached pooled keys:
:func:`pool_keys_step`, :func:`select_pools_step`. :func:`key_norm` belongs to both.
"""

from __future__ import annotations

import torch

from .dispatch import Operator
from .float32 import ieee_float32
from .packing import (
    document_ids,
    group_by_length,
    positions_in_document,
    spread_rows,
    ungroup,
    validate_cu_seqlens,
)
from .validation import ShapeError, check_cumulative, check_places, check_tensor

KEY_NORM_EPS = 1e-6


@torch.no_grad()
def key_norm_reference(key: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LayerNorm of the indexer's keys, eps 1e-6 (no field of the config holds it), fp32 inside, one rounding.

    Args:
        key: ``[..., D]``, output of ``wk``.
        weight, bias: ``[D]``.

    Returns:
        ``[..., D]`` in ``key.dtype``.
    """
    sizes = (key.shape[-1],)
    return torch.nn.functional.layer_norm(key.float(), sizes, weight.float(), bias.float(), KEY_NORM_EPS).to(key.dtype)


@torch.no_grad()
def pool_keys_reference(
    key: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool the keys of every finished pool: per channel, a softmax over its tokens weighs them.

    fp32 inside with one rounding, of the sum, to the keys' dtype; transformers in bf16 also rounds probabilities and
    products.

    Args:
        key: ``[T, D]``, after :func:`key_norm`.
        gate: ``[T, D]``, the logits ``index_kpool_compress_gate @ x``.
        ape: ``[kpool, D]``, added to the logits by place in the pool.
        cu_seqlens: int32 ``[N + 1]``.

    Returns:
        pooled ``[T // kpool, D]`` in ``key.dtype`` and ``cu_pools`` int32 ``[N + 1]``, the finished pools of the
        documents after one another. Rows from ``cu_pools[-1]`` on are zero: the shape does not depend on the lengths.
    """
    tokens, kpool = key.shape[0], ape.shape[0]
    validate_cu_seqlens(cu_seqlens, tokens)
    pools = cu_seqlens.diff() // kpool
    cu_pools = torch.nn.functional.pad(pools.cumsum(0), (1, 0)).to(torch.int32)
    rows = tokens // kpool
    document = document_ids(cu_pools, rows).clamp(max=pools.shape[0] - 1)
    place = torch.arange(rows, device=key.device)
    first = cu_seqlens[document] + (place - cu_pools[document]) * kpool
    members = first.unsqueeze(1) + torch.arange(kpool, device=key.device)
    finished = place < cu_pools[-1]
    members = torch.where(finished.unsqueeze(1), members, 0)
    pooled = _pool(key[members], gate[members], ape).to(key.dtype)
    return torch.where(finished.unsqueeze(1), pooled, 0), cu_pools


@torch.no_grad()
def select_pools_reference(
    q: torch.Tensor,
    pooled: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_pools: torch.Tensor,
    kpool: int,
    topk: int,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the pools of every query: the highest ``sum_h weights[h] * relu(q[h] . pooled * D^-0.5)``, in fp32.

    A pool of the query's document is a candidate iff its last token is at or before the query. Among equal scores the
    lower pool wins (exact zeros are common).

    Args:
        q: ``[T, Hi, D]``, from the *normalised* query latent; ``[t, Hi, D]`` with ``places``.
        pooled, cu_pools: from :func:`pool_keys`.
        weights: ``[T, Hi]`` (``[t, Hi]``), signed, ``weights_proj(x) * Hi^-0.5``.
        cu_seqlens: int32 ``[N + 1]``.
        kpool: tokens in a pool.
        topk: tokens to select; a multiple of ``kpool``.
        places: int64 ``[t]``, the packed tokens that ask, where only some of them do.

    Returns:
        int32 ``[T, topk // kpool]`` (``[t, ...]``): pools counted within the document, ascending, -1 behind the last.
    """
    tokens, chosen = q.shape[0] if places is None else int(cu_seqlens[-1]), topk // kpool
    validate_cu_seqlens(cu_seqlens, tokens)
    q, weights = (spread_rows(rows, places, tokens) for rows in (q, weights))
    groups, results = group_by_length(cu_seqlens), []
    for group in groups:
        pools = torch.arange(group.length // kpool, device=q.device)
        members = (cu_pools[group.documents].unsqueeze(1) + pools).clamp(max=max(pooled.shape[0] - 1, 0))
        candidates = (torch.arange(group.length, device=q.device) + 1) // kpool
        scores = _scores(group.pad(q), pooled[members], group.pad(weights))
        results.append(_best(scores, candidates.expand(scores.shape[:2]), chosen))
    ids = ungroup(groups, results, tokens) if groups else q.new_zeros(0, chosen, dtype=torch.int32)
    return ids if places is None else ids[places]


@torch.no_grad()
def pool_keys_step_reference(
    key: torch.Tensor,
    gate: torch.Tensor,
    tail_key: torch.Tensor,
    tail_gate: torch.Tensor,
    ape: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take in one new token a sequence; every sequence computes a pool, which is valid where it has become finished.

    Args:
        key, gate: ``[B, D]``, of the new token, as for :func:`pool_keys`.
        tail_key, tail_gate: ``[B, kpool - 1, D]``, keys and logits of the unfinished pool before it, first token first.
        ape: ``[kpool, D]``.
        seq_lens: int32 ``[B]``, lengths with the new token.

    Returns:
        pooled ``[B, D]``; finished bool ``[B]``, where ``pooled`` is pool ``seq_lens // kpool - 1`` of its sequence;
        the new tails, both fresh.
    """
    kpool = ape.shape[0]
    offset = (seq_lens - 1) % kpool
    finished = (offset == kpool - 1) & (seq_lens > 0)
    pooled = _pool(
        torch.cat([tail_key, key.unsqueeze(1)], dim=1), torch.cat([tail_gate, gate.unsqueeze(1)], dim=1), ape
    ).to(key.dtype)
    here = torch.arange(kpool - 1, device=key.device) == offset.unsqueeze(1)
    tails = (
        torch.where(here.unsqueeze(-1), new.unsqueeze(1), tail) for new, tail in ((key, tail_key), (gate, tail_gate))
    )
    return pooled, finished, *tails


@torch.no_grad()
def select_pools_step_reference(
    q: torch.Tensor,
    pooled: torch.Tensor,
    weights: torch.Tensor,
    pool_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kpool: int,
    topk: int,
) -> torch.Tensor:
    """Choose the pools of one new token a sequence among cached pooled keys; scores and ties as :func:`select_pools`.

    Args:
        q: ``[B, Hi, D]``.
        pooled: cache ``[S, D]``.
        weights: ``[B, Hi]``.
        pool_table: int32 ``[B, P]``, the cache row of each pool of a sequence; entries from ``seq_lens // kpool`` on
            are not used, but must be rows of the cache.
        seq_lens: int32 ``[B]``, lengths with the new token; 0 for an unused row of the batch.
        kpool, topk: as in :func:`select_pools`.

    Returns:
        int32 ``[B, topk // kpool]``, ascending, -1 behind the last.
    """
    scores = _scores(q.unsqueeze(1), pooled[pool_table.long()], weights.unsqueeze(1))
    return _best(scores, (seq_lens // kpool).unsqueeze(1), topk // kpool).squeeze(1)


def selected_positions(pool_ids: torch.Tensor, visible: torch.Tensor, kpool: int) -> torch.Tensor:
    """The tokens of the selected pools and of the unfinished tail, counted within the document.

    Args:
        pool_ids: int32 ``[..., k]``, from a selection.
        visible: ``[...]``, how many tokens the query sees, itself included; 0 for an unused row.
        kpool: tokens in a pool.

    Returns:
        int32 ``[..., k * kpool + kpool - 1]``, ascending if ``pool_ids`` is, -1 behind the last.
    """
    offsets = torch.arange(kpool, device=pool_ids.device, dtype=torch.int32)
    pools = pool_ids.unsqueeze(-1)
    members = torch.where(pools >= 0, pools * kpool + offsets, -1).flatten(-2)
    visible = visible.to(torch.int32).unsqueeze(-1)
    tail = visible // kpool * kpool + offsets[: kpool - 1]
    positions = torch.cat([members, torch.where(tail < visible, tail, -1)], dim=-1)
    order = torch.argsort((positions < 0).to(torch.uint8), dim=-1, stable=True)
    return positions.gather(-1, order)


def selected_tokens(pool_ids: torch.Tensor, cu_seqlens: torch.Tensor, kpool: int) -> torch.Tensor:
    """The same as places in the packed row.

    Args:
        pool_ids: int32 ``[T, k]``.
        cu_seqlens: int32 ``[N + 1]``.
        kpool: tokens in a pool.

    Returns:
        int32 ``[T, k * kpool + kpool - 1]``, -1 behind the last.
    """
    tokens = pool_ids.shape[0]
    positions = selected_positions(pool_ids, positions_in_document(cu_seqlens, tokens) + 1, kpool)
    starts = cu_seqlens[document_ids(cu_seqlens, tokens)].unsqueeze(1)
    return torch.where(positions >= 0, positions + starts, -1)


def _pool(key: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """Keys and logits ``[n, kpool, D]`` to fp32 ``[n, D]``."""
    return (torch.softmax(gate.float() + ape.float(), dim=1) * key.float()).sum(1)


def _scores(q: torch.Tensor, pooled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Queries ``[n, L, Hi, D]``, pools ``[n, P, D]`` and weights ``[n, L, Hi]`` to fp32 scores ``[n, L, P]``."""
    with ieee_float32(q.device):
        products = torch.matmul(q.float().flatten(1, 2), pooled.float().transpose(1, 2)).unflatten(1, q.shape[1:3])
        scores = torch.matmul(weights.float().unsqueeze(-2), torch.relu(products * q.shape[-1] ** -0.5))
    return scores.squeeze(-2)


def _best(scores: torch.Tensor, candidates: torch.Tensor, chosen: int) -> torch.Tensor:
    """Scores ``[n, L, P]``, of which the first ``candidates`` ``[n, L]`` count, to pools int32 ``[n, L, chosen]``."""
    pools = torch.arange(scores.shape[-1], device=scores.device)
    candidates = candidates.unsqueeze(-1)
    # adding 0.0 makes -0.0 and 0.0 one value for every sort; a stable sort keeps the lower pool first
    scores = torch.where(pools < candidates, scores + 0.0, float("-inf"))
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., :chosen]
    behind = scores.shape[-1]
    ids = torch.where(ids < candidates, ids, behind).sort(dim=-1).values
    ids = torch.where(ids < behind, ids, -1).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, chosen - ids.shape[-1]), value=-1)


def _check_key_norm(key: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    check_tensor("key_norm", "key", key, "[..., D]", (None,))
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_tensor("key_norm", name, parameter, "[D]", (key.shape[-1],))


def _check_pool_keys(key: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    check_tensor("pool_keys", "key", key, "[T, D]", (None, None))
    check_tensor("pool_keys", "gate", gate, "[T, D]", tuple(key.shape))
    check_tensor("pool_keys", "ape", ape, "[kpool, D]", (None, key.shape[1]))
    check_cumulative("pool_keys", "cu_seqlens", cu_seqlens)


def _check_counts(operator: str, kpool: int, topk: int) -> None:
    if kpool < 1 or topk < kpool or topk % kpool:
        raise ShapeError(f"{operator}: topk is {topk}, kpool {kpool}; needed: topk a positive multiple of kpool")


def _check_select_pools(q, pooled, weights, cu_seqlens, cu_pools, kpool, topk, places=None) -> None:
    check_tensor("select_pools", "q", q, "[T, Hi, D]", (None, None, None))
    tokens, heads, dim = q.shape
    check_tensor("select_pools", "pooled", pooled, "[P, D]", (None, dim))
    check_tensor("select_pools", "weights", weights, "[T, Hi]", (tokens, heads))
    check_cumulative("select_pools", "cu_seqlens", cu_seqlens)
    check_tensor("select_pools", "cu_pools", cu_pools, "[N + 1]", tuple(cu_seqlens.shape), torch.int32)
    _check_counts("select_pools", kpool, topk)
    check_places("select_pools", places, tokens)


def _check_pool_keys_step(key, gate, tail_key, tail_gate, ape, seq_lens) -> None:
    operator = "pool_keys_step"
    check_tensor(operator, "key", key, "[B, D]", (None, None))
    batch, dim = key.shape
    check_tensor(operator, "gate", gate, "[B, D]", (batch, dim))
    check_tensor(operator, "ape", ape, "[kpool, D]", (None, dim))
    for name, tail in (("tail_key", tail_key), ("tail_gate", tail_gate)):
        check_tensor(operator, name, tail, "[B, kpool - 1, D]", (batch, ape.shape[0] - 1, dim))
    check_tensor(operator, "seq_lens", seq_lens, "[B]", (batch,), torch.int32)


def _check_select_pools_step(q, pooled, weights, pool_table, seq_lens, kpool, topk) -> None:
    operator = "select_pools_step"
    check_tensor(operator, "q", q, "[B, Hi, D]", (None, None, None))
    batch, heads, dim = q.shape
    check_tensor(operator, "pooled", pooled, "[S, D]", (None, dim))
    check_tensor(operator, "weights", weights, "[B, Hi]", (batch, heads))
    check_tensor(operator, "pool_table", pool_table, "[B, P]", (batch, None), torch.int32)
    check_tensor(operator, "seq_lens", seq_lens, "[B]", (batch,), torch.int32)
    _check_counts(operator, kpool, topk)


key_norm = Operator("key_norm", key_norm_reference, _check_key_norm)
pool_keys = Operator("pool_keys", pool_keys_reference, _check_pool_keys)
select_pools = Operator("select_pools", select_pools_reference, _check_select_pools)
pool_keys_step = Operator("pool_keys_step", pool_keys_step_reference, _check_pool_keys_step)
select_pools_step = Operator("select_pools_step", select_pools_step_reference, _check_select_pools_step)
