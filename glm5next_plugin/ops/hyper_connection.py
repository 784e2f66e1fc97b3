"""Manifold-constrained hyper-connections: n residual streams, mixed by the token itself around every sub-layer.

:func:`hc_pre` gives the sub-layer's input and the mixes, :func:`hc_post` the new streams; :func:`hc_expand` and
:func:`hc_contract` enter and leave the streams.
"""

from __future__ import annotations

import torch

from .dispatch import Operator
from .float32 import linear_float32, matmul_float32
from .validation import ShapeError, check_tensor


def hc_pre_reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the streams into a sub-layer's input and compute how its output will be mixed back.

    All streams of a token, flattened, are RMS-normalised without a weight and projected to ``pre`` n, ``post`` n and
    ``comb`` n * n, each with its scale plus ``base``. ``pre = sigmoid + hc_eps``, ``post = 2 * sigmoid``; ``comb`` is a
    softmax over the last axis + ``hc_eps``, then Sinkhorn-Knopp: a column normalisation and ``sinkhorn_iters - 1``
    times (rows, columns), every denominator + ``hc_eps``. fp32 throughout, without TF32.

    Args:
        streams: ``[..., n, h]``.
        fn: ``[(2 + n) * n, n * h]``.
        base: ``[(2 + n) * n]``.
        scale: ``[3]``, of pre, post and comb.
        norm_eps: ``rms_norm_eps``, inside the root.
        hc_eps, sinkhorn_iters: of the config.

    Returns:
        x ``[..., h]`` in the streams' dtype; post ``[..., n]`` and comb ``[..., n, n]`` (from, to), both fp32.
    """
    n = streams.shape[-2]
    wide = streams.float()
    flat = wide.flatten(-2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    # mixes first, tokens last: sums over n = 4 entries then run along the tokens
    mixes = linear_float32(flat, fn).movedim(-1, 0).contiguous()
    column = base.float().view(-1, *(1,) * (mixes.dim() - 1))
    scale = scale.float()
    pre = torch.sigmoid(mixes[:n] * scale[0] + column[:n]) + hc_eps
    post = 2 * torch.sigmoid(mixes[n : 2 * n] * scale[1] + column[n : 2 * n])
    comb = (mixes[2 * n :] * scale[2] + column[2 * n :]).unflatten(0, (n, n))
    comb = torch.softmax(comb, dim=1) + hc_eps
    for axis in (0,) + (1, 0) * (sinkhorn_iters - 1):
        comb = comb * (comb.sum(axis, keepdim=True) + hc_eps).reciprocal()
    x = (pre.movedim(0, -1).unsqueeze(-1) * wide).sum(-2).to(streams.dtype)
    return x, post.movedim(0, -1).contiguous(), comb.movedim((0, 1), (-2, -1)).contiguous()


def hc_post_reference(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    mix_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """New streams: ``out[j] = post[j] * y + sum_i comb[i, j] * streams[i]``.

    Args:
        y: the sub-layer's output ``[..., h]``.
        streams: the streams that :func:`hc_pre` saw, ``[..., n, h]``.
        post, comb: from :func:`hc_pre`.
        mix_dtype: fp32 mixes in fp32 and rounds once. The streams' dtype rounds post and comb, both terms and the sum,
            as transformers does.

    Returns:
        a fresh ``[..., n, h]`` in the streams' dtype.
    """
    post, comb = post.to(mix_dtype), comb.to(mix_dtype)
    if mix_dtype == streams.dtype and mix_dtype != torch.float32:
        return post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    # one product over the streams and the output: a sum of outer products would move five times the memory
    mix = torch.cat([comb.transpose(-1, -2), post.unsqueeze(-1)], dim=-1)
    sources = torch.cat([streams, y.unsqueeze(-2)], dim=-2)
    return matmul_float32(mix, sources).to(streams.dtype)


def hc_expand(x: torch.Tensor, n: int) -> torch.Tensor:
    """Copy ``[..., h]`` to n streams, a fresh ``[..., n, h]``."""
    return x.unsqueeze(-2).repeat(*(1,) * (x.dim() - 1), n, 1)


def hc_contract(streams: torch.Tensor) -> torch.Tensor:
    """Plain mean over the streams ``[..., n, h]``: a fresh ``[..., h]``, fp32 inside, one rounding."""
    return streams.float().mean(-2).to(streams.dtype)


def _check_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    check_tensor("hc_pre", "streams", streams, "[..., n, h]", (None, None))
    n, h = streams.shape[-2:]
    width = (2 + n) * n
    check_tensor("hc_pre", "fn", fn, "[(2 + n) * n, n * h]", (width, n * h))
    check_tensor("hc_pre", "base", base, "[(2 + n) * n]", (width,))
    check_tensor("hc_pre", "scale", scale, "[3]", (3,))
    if sinkhorn_iters < 1:
        raise ShapeError(f"hc_pre: sinkhorn_iters is {sinkhorn_iters}; needed: at least 1")


def _check_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    mix_dtype: torch.dtype = torch.float32,
) -> None:
    check_tensor("hc_post", "streams", streams, "[..., n, h]", (None, None))
    *leading, n, h = streams.shape
    check_tensor("hc_post", "y", y, "streams without n", (*leading, h))
    check_tensor("hc_post", "post", post, "streams without h", (*leading, n))
    check_tensor("hc_post", "comb", comb, "streams with n instead of h", (*leading, n, n))
    if mix_dtype not in (torch.float32, streams.dtype):
        raise ShapeError(f"hc_post: mix_dtype is {mix_dtype}; needed: torch.float32 or {streams.dtype} (the streams')")


hc_pre = Operator("hc_pre", hc_pre_reference, _check_pre)
hc_post = Operator("hc_post", hc_post_reference, _check_post)
