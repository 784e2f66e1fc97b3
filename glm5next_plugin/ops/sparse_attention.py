"""NoPE multi-latent attention over the keys that the indexer selected."""

from __future__ import annotations

import torch

from .dispatch import Operator
from .indexer import selected_positions
from .packing import (
    PaddedDocuments,
    group_by_length,
    positions_in_document,
    spread_rows,
    ungroup,
    validate_cu_seqlens,
)
from .validation import ShapeError, check_cumulative, check_places, check_tensor


def sparse_mla_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pool_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kpool: int,
    scale: float,
    places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query over its selected pools and the unfinished tail of its document.

    Keys and values are ``kv_b @ latent``. fp32 inside, the output is rounded once; transformers in bf16 also rounds
    keys, values and probabilities. A mask stands for the selection: memory grows with the square of the length.

    Args:
        q: ``[T, H, Dqk]``; ``[t, H, Dqk]`` with ``places``.
        latent: ``[T, R]``, after its norm.
        kv_b: ``[H, Dqk + Dv, R]``.
        pool_ids: int32 ``[T, k]`` (``[t, k]``): pools of the query's document, -1 for none.
        cu_seqlens: int32 ``[N + 1]``.
        kpool: tokens in a pool.
        scale: of the logits, ``Dqk^-0.5``.
        places: int64 ``[t]``, the packed tokens that ask, where only some of them do.

    Returns:
        out ``[T, H, Dv]`` (``[t, ...]``) in ``q.dtype`` and the log of the softmax denominator, fp32 ``[T, H]``. A
        query without a key has output 0 and log denominator ``-inf``.

    Raises:
        ShapeError: a query names a pool that is not finished before it, or is not there.
    """
    tokens = latent.shape[0]
    validate_cu_seqlens(cu_seqlens, tokens)
    q = spread_rows(q, places, tokens)
    if places is not None:
        # a token that does not ask selects no pool
        pool_ids = spread_rows(pool_ids + 1, places, tokens) - 1
    _validate_pool_ids(pool_ids, cu_seqlens, kpool)
    dim = q.shape[-1]
    expanded = torch.einsum("tr,hdr->thd", latent.float(), kv_b.float())
    groups, outputs, denominators = group_by_length(cu_seqlens), [], []
    for group in groups:
        queries, keys_values = (group.pad(x).transpose(1, 2) for x in (q.float(), expanded))  # [n, H, L, D]
        keys, values = keys_values.split([dim, keys_values.shape[-1] - dim], dim=-1)
        visible = _visible_keys(group, pool_ids, kpool).unsqueeze(1)
        out, lse = _attend(torch.matmul(queries, keys.transpose(-1, -2)) * scale, visible)
        outputs.append(torch.matmul(out, values).transpose(1, 2))
        denominators.append(lse.transpose(1, 2))
    if not groups:
        return expanded[..., dim:].to(q.dtype), expanded.new_zeros(q.shape[:2])
    out, lse = ungroup(groups, outputs, tokens).to(q.dtype), ungroup(groups, denominators, tokens)
    return (out, lse) if places is None else (out[places], lse[places])


def sparse_mla_step_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pool_ids: torch.Tensor,
    slot_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kpool: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last token of each sequence attends over cached latents, with ``kv_b`` absorbed into query and output.

    Args:
        q: ``[B, H, Dqk]``.
        latent: cache ``[S, R]``; the new token's latent is in it.
        kv_b: ``[H, Dqk + Dv, R]``.
        pool_ids: int32 ``[B, k]``, pools of the sequence, -1 for none.
        slot_table: int32 ``[B, L]``, the cache row of each token of a sequence.
        seq_lens: int32 ``[B]``, lengths with the new token; 0 for an unused row of the batch.
        kpool, scale: as in :func:`sparse_mla`.

    Returns:
        out ``[B, H, Dv]`` in ``q.dtype`` and fp32 ``[B, H]``, as :func:`sparse_mla`.
    """
    dim = q.shape[-1]
    positions = selected_positions(pool_ids, seq_lens, kpool).long()
    selected = latent[slot_table.gather(1, positions.clamp(min=0)).long()].float()  # [B, W, R]
    absorbed = torch.einsum("bhd,hdr->bhr", q.float(), kv_b[:, :dim].float())
    probabilities, lse = _attend(
        torch.matmul(absorbed, selected.transpose(1, 2)) * scale, (positions >= 0).unsqueeze(1)
    )
    out = torch.einsum("bhr,hdr->bhd", torch.matmul(probabilities, selected), kv_b[:, dim:].float())
    return out.to(q.dtype), lse


def _attend(logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of ``logits [..., K]`` where ``visible`` and log denominators; rows that see nothing are zero."""
    logits = logits.masked_fill(~visible, float("-inf"))
    return torch.where(visible, torch.softmax(logits, dim=-1), 0), torch.logsumexp(logits, dim=-1)


def _visible_keys(group: PaddedDocuments, pool_ids: torch.Tensor, kpool: int) -> torch.Tensor:
    """Which keys each query of the group attends to: bool ``[n, L, L]``, query first."""
    length = group.length
    place = torch.arange(length, device=pool_ids.device)
    pools = length // kpool
    ids = group.pad(pool_ids).long()
    ids = torch.where(ids < 0, pools, ids)
    chosen = torch.zeros(*ids.shape[:2], pools + 1, dtype=torch.bool, device=ids.device).scatter(2, ids, True)
    # a key behind the last pool of the group looks up column `pools`, which must say no
    chosen[..., pools] = False
    tail = (place // kpool == ((place + 1) // kpool).unsqueeze(1)) & (place <= place.unsqueeze(1))
    return chosen[..., place // kpool] | tail


def _validate_pool_ids(pool_ids: torch.Tensor, cu_seqlens: torch.Tensor, kpool: int) -> None:
    finished = ((positions_in_document(cu_seqlens, pool_ids.shape[0]) + 1) // kpool).unsqueeze(1)
    wrong = (pool_ids < -1) | (pool_ids >= finished)
    if wrong.any():
        token, place = wrong.nonzero()[0].tolist()
        raise ShapeError(
            f"sparse_mla: token {token} selects pool {int(pool_ids[token, place])}; needed: -1 or one of the "
            f"{int(finished[token])} pools of {kpool} tokens that are finished in its document"
        )


def _check(q, latent, kv_b, pool_ids, cu_seqlens, kpool, scale, places=None) -> None:
    check_tensor("sparse_mla", "q", q, "[T, H, Dqk]", (None, None, None))
    tokens = q.shape[0]
    check_tensor("sparse_mla", "latent", latent, "[T, R]", (tokens if places is None else None, None))
    _check_shared("sparse_mla", q, latent, kv_b, kpool)
    check_tensor("sparse_mla", "pool_ids", pool_ids, "[T, k]", (tokens, None), torch.int32)
    check_cumulative("sparse_mla", "cu_seqlens", cu_seqlens)
    check_places("sparse_mla", places, tokens)


def _check_step(q, latent, kv_b, pool_ids, slot_table, seq_lens, kpool, scale) -> None:
    operator = "sparse_mla_step"
    check_tensor(operator, "q", q, "[B, H, Dqk]", (None, None, None))
    batch = q.shape[0]
    check_tensor(operator, "latent", latent, "[S, R]", (None, None))
    _check_shared(operator, q, latent, kv_b, kpool)
    check_tensor(operator, "pool_ids", pool_ids, "[B, k]", (batch, None), torch.int32)
    check_tensor(operator, "slot_table", slot_table, "[B, L]", (batch, None), torch.int32)
    check_tensor(operator, "seq_lens", seq_lens, "[B]", (batch,), torch.int32)


def _check_shared(operator: str, q: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, kpool: int) -> None:
    check_tensor(operator, "kv_b", kv_b, "[H, Dqk + Dv, R]", (q.shape[1], None, latent.shape[1]))
    if kv_b.shape[1] <= q.shape[2]:
        raise ShapeError(f"{operator}: kv_b has {kv_b.shape[1]} rows a head; needed: more than Dqk ({q.shape[2]})")
    if kpool < 1:
        raise ShapeError(f"{operator}: kpool is {kpool}; needed: at least 1")


sparse_mla = Operator("sparse_mla", sparse_mla_reference, _check)
sparse_mla_step = Operator("sparse_mla_step", sparse_mla_step_reference, _check_step)
