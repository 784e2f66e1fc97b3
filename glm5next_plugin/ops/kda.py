"""Kimi Delta Attention: linear attention with a decay per channel and the delta rule.

For each document and head, a state ``S [K, V]`` starts at zero and each token does::

    S = exp(log_decay)[:, None] * S
    S = S + beta * k[:, None] * (v - S^T k)[None, :]
    o = S^T q

with q and k L2-normalised and q scaled by ``K^-0.5``. :func:`kda_recurrent` is this definition, :func:`kda` the same in
chunks, :func:`kda_step` one token of it. States and all arithmetic are fp32.
"""

from __future__ import annotations

import torch

from .dispatch import Operator
from .packing import (
    cumulative_lengths,
    document_ids,
    group_by_length,
    positions_in_document,
    ungroup,
    validate_cu_seqlens,
)
from .validation import ShapeError, check_cumulative, check_tensor

_L2_NORM_EPS = 1e-6
_CHUNK = 8


def kda_gate_reference(
    raw: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay of each channel: ``lower_bound * sigmoid(exp(A_log) * (raw + dt_bias))``.

    The bound is a scale, not a clamp. Without one: ``-exp(A_log) * softplus(raw + dt_bias)``.

    Args:
        raw: ``[T, H, D]``, output of ``f_b(f_a(x))``.
        A_log: ``[H]``.
        dt_bias: ``[H * D]``, flat.
        lower_bound: ``gate_lower_bound`` of the config, negative, or ``None``.

    Returns:
        fp32 ``[T, H, D]``, at most 0.
    """
    rate = torch.exp(A_log.float()).unsqueeze(-1)
    shifted = raw.float() + dt_bias.float().view(raw.shape[1:])
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The definition, token by token; arguments and results as :func:`kda`. For tests: it is slow."""
    _check(q, k, v, log_decay, beta, cu_seqlens, initial_state, output_final_state)
    tokens = q.shape[0]
    validate_cu_seqlens(cu_seqlens, tokens)
    queries, keys = _normalise(q, k)
    final = _initial_state(initial_state, cu_seqlens, k, v).clone()
    groups, outputs = group_by_length(cu_seqlens), []
    for group in groups:
        # behind its end a document has no decay, no key and no beta: its state stays
        columns = [group.pad(x).unbind(1) for x in (queries, keys, v.float(), log_decay, beta.float())]
        state, steps = final[group.documents], []
        for q_t, k_t, v_t, g_t, b_t in zip(*columns, strict=True):
            output, state = _advance(q_t, k_t, v_t, g_t, b_t, state)
            steps.append(output)
        outputs.append(torch.stack(steps, dim=1))
        final = final.index_copy(0, group.documents, state)
    output = ungroup(groups, outputs, tokens) if groups else torch.zeros_like(v)
    return output.to(q.dtype), final if output_final_state else None


def kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over packed documents (definition: :mod:`glm5next_plugin.ops.kda`).

    Works in chunks of 8 tokens; every decay between two tokens is the exponential of the summed log decays between
    them, at most 1, so nothing overflows, however strong the decay. L2 norm (``x / sqrt(sum x^2 + 1e-6)``) and scale
    happen inside.

    Args:
        q, k: ``[T, H, K]``.
        v: ``[T, H, V]``.
        log_decay: fp32 ``[T, H, K]``, at most 0, from :func:`kda_gate`.
        beta: ``[T, H]``, in 0..1.
        cu_seqlens: int32 ``[N + 1]``.
        initial_state: fp32 ``[N, H, K, V]``; zeros if left out.
        output_final_state: whether to return the states after each document's last token.

    Returns:
        o ``[T, H, V]`` in ``q.dtype`` and the states fp32 ``[N, H, K, V]`` or ``None``.
    """
    tokens = q.shape[0]
    validate_cu_seqlens(cu_seqlens, tokens)
    chunks = _Chunks(cu_seqlens, tokens)
    queries, keys = (chunks.split(x) for x in _normalise(q, k))  # [M, H, C, K]
    values, betas, decay = chunks.split(v.float()), chunks.split(beta.float()).unsqueeze(-1), chunks.split(log_decay)
    between = torch.matmul(_windows(q.device), decay).exp_().unflatten(2, (_CHUNK, _CHUNK))  # [M, H, C, C, K], to, from
    from_start, to_end = decay.cumsum(-2).exp(), between[..., -1, :, :]
    scores = torch.matmul(keys.unsqueeze(-3) * between, torch.stack([keys * betas, queries], dim=-1))
    key_scores, query_scores = (part.tril() for part in scores.unbind(-1))
    # (1 + key_scores below the diagonal) u = beta * (v - decayed k^T S), for both parts of the right side at once
    right = torch.cat([values * betas, keys * from_start * betas], dim=-1)
    solved = torch.linalg.solve_triangular(key_scores, right, upper=False, unitriangular=True)
    updates, corrections = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    # split, not slices: the gradient of a slice is as large as the whole
    parts = (
        part.split(chunks.running)
        for part in (
            updates,
            corrections,
            queries * from_start,
            query_scores,
            (keys * to_end).transpose(-1, -2),
            from_start[..., -1, :].unsqueeze(-1),
        )
    )
    state = _initial_state(initial_state, cu_seqlens, k, v)[chunks.longest_first]
    outputs, finished = [], []
    for running, update, correction, query, score, key, remaining in zip(chunks.running, *parts, strict=True):
        state, ended = state.split([running, state.shape[0] - running])
        finished.append(ended)
        update = update - correction @ state
        outputs.append(query @ state + score @ update)
        state = remaining * state + key @ update
    finished.append(state)
    output = chunks.join(outputs).to(q.dtype) if outputs else torch.zeros_like(v).to(q.dtype)
    if not output_final_state:
        return output, None
    final = torch.cat(finished[::-1])
    return output, torch.empty_like(final).index_copy(0, chunks.longest_first, final)


def kda_step_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One new token a sequence.

    Args:
        q, k: ``[B, H, K]``.
        v: ``[B, H, V]``.
        log_decay: fp32 ``[B, H, K]``.
        beta: ``[B, H]``.
        state: fp32 ``[B, H, K, V]``.

    Returns:
        o ``[B, H, V]`` in ``q.dtype`` and a fresh state fp32 ``[B, H, K, V]``.
    """
    query, key = _normalise(q, k)
    output, state = _advance(query, key, v.float(), log_decay, beta.float(), state)
    return output.to(q.dtype), state


def _normalise(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L2 norm of both, scale of the query; fp32."""
    q, k = (x.float() / torch.sqrt(x.float().square().sum(-1, keepdim=True) + _L2_NORM_EPS) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _advance(q, k, v, log_decay, beta, state):
    """The definition for one token: ``[n, H, *]`` and the state ``[n, H, K, V]``, all fp32."""
    state = log_decay.exp().unsqueeze(-1) * state
    delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def _initial_state(
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    if initial_state is not None:
        return initial_state
    sizes = (cu_seqlens.shape[0] - 1, *k.shape[1:], v.shape[-1])
    return torch.zeros(sizes, dtype=torch.float32, device=k.device)


def _windows(device: torch.device) -> torch.Tensor:
    """The matrix ``[C * C, C]`` that sums the log decays behind token j up to token i, for every i and j.

    Sums, where differences of cumulative sums would lose a weak decay behind a strong one. Zero for j >= i.
    """
    place = torch.arange(_CHUNK, device=device)
    to, since, token = place.view(-1, 1, 1), place.view(-1, 1), place
    return ((since < token) & (token <= to)).flatten(0, 1).float()


class _Chunks:
    """Each document cut into chunks of ``_CHUNK`` tokens, the last one filled up with zeros; no other padding.

    Chunks are ordered by round: first the first chunk of every document, the longest document first, and so on. The
    documents of a round are then a prefix of those of the round before.
    """

    def __init__(self, cu_seqlens: torch.Tensor, tokens: int):
        counts = (cu_seqlens.diff().long() + _CHUNK - 1) // _CHUNK
        self.longest_first = torch.argsort(counts, descending=True, stable=True)
        rank = torch.empty_like(self.longest_first)
        rank[self.longest_first] = torch.arange(rank.shape[0], device=rank.device)
        rounds = torch.arange(max(counts.tolist(), default=0), device=rank.device)
        running = (counts > rounds.unsqueeze(1)).sum(1)
        first = cumulative_lengths(running).long()
        position = positions_in_document(cu_seqlens, tokens)
        chunk = first[position // _CHUNK] + rank[document_ids(cu_seqlens, tokens)]
        self._slots = chunk * _CHUNK + position % _CHUNK
        self.running = running.tolist()

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """``[T, H, ...]`` to ``[M, H, C, ...]``."""
        filled = rows.new_zeros(sum(self.running) * _CHUNK, *rows.shape[1:]).index_copy(0, self._slots, rows)
        return filled.unflatten(0, (sum(self.running), _CHUNK)).transpose(1, 2)

    def join(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Outputs ``[m, H, C, V]`` of the rounds to rows ``[T, H, V]``."""
        return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, self._slots)


def _check_gate(raw: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> None:
    check_tensor("kda_gate", "raw", raw, "[T, H, D]", (None, None, None))
    _, heads, dim = raw.shape
    check_tensor("kda_gate", "A_log", A_log, "[H]", (heads,))
    check_tensor("kda_gate", "dt_bias", dt_bias, "[H * D]", (heads * dim,))
    if lower_bound is not None and not lower_bound < 0:
        raise ShapeError(f"kda_gate: lower_bound is {lower_bound!r}; needed: a negative number or None")


def _check_token_arguments(operator: str, letter: str, q, k, v, log_decay, beta) -> None:
    check_tensor(operator, "q", q, f"[{letter}, H, K]", (None, None, None))
    count, heads, dim = q.shape
    check_tensor(operator, "k", k, f"[{letter}, H, K]", (count, heads, dim))
    check_tensor(operator, "v", v, f"[{letter}, H, V]", (count, heads, None))
    check_tensor(operator, "log_decay", log_decay, f"[{letter}, H, K]", (count, heads, dim), torch.float32)
    check_tensor(operator, "beta", beta, f"[{letter}, H]", (count, heads))


def _check(q, k, v, log_decay, beta, cu_seqlens, initial_state=None, output_final_state=False) -> None:
    _check_token_arguments("kda", "T", q, k, v, log_decay, beta)
    check_cumulative("kda", "cu_seqlens", cu_seqlens)
    if initial_state is not None:
        sizes = (cu_seqlens.shape[0] - 1, *k.shape[1:], v.shape[-1])
        check_tensor("kda", "initial_state", initial_state, "[N, H, K, V]", sizes, torch.float32)


def _check_step(q, k, v, log_decay, beta, state) -> None:
    _check_token_arguments("kda_step", "B", q, k, v, log_decay, beta)
    check_tensor("kda_step", "state", state, "[B, H, K, V]", (*k.shape, v.shape[-1]), torch.float32)


kda_gate = Operator("kda_gate", kda_gate_reference, _check_gate)
kda = Operator("kda", kda_reference, _check)
kda_step = Operator("kda_step", kda_step_reference, _check_step)
