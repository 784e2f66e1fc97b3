"""Shapes and dtypes of an operator's arguments, checked from metadata alone (no host synchronisation)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm5next_plugin.errors import InputError


class ShapeError(InputError):
    """An argument whose shape or dtype the operator is not defined for."""


def check_tensor(
    operator: str,
    name: str,
    tensor: torch.Tensor,
    layout: str,
    sizes: Sequence[int | None],
    dtype: torch.dtype | None = None,
) -> None:
    """Compare one argument with what the operator needs.

    Args:
        operator, name: who asks, for which argument; both go into the message.
        layout: the needed shape in the letters of the docstring, e.g. ``"[T, H, D]"``.
        sizes: the needed sizes; ``None`` accepts any. A leading ``...`` in ``layout`` accepts any leading dimensions.
        dtype: the needed dtype; ``None`` accepts any floating dtype.

    Raises:
        ShapeError: names operator, argument, the shape or dtype found and the one needed.
    """
    found = tuple(tensor.shape)
    compared = found[len(found) - len(sizes) :] if layout.startswith("[...") and len(found) >= len(sizes) else found
    fits = len(compared) == len(sizes)
    fits = fits and all(need is None or have == need for have, need in zip(compared, sizes, strict=True))
    if not fits:
        needed = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ShapeError(f"{operator}: {name} has shape {list(found)}; needed: {layout} = [{needed}]")
    if dtype is None and not tensor.is_floating_point():
        raise ShapeError(f"{operator}: {name} is {tensor.dtype}; needed: a floating dtype")
    if dtype is not None and tensor.dtype != dtype:
        raise ShapeError(f"{operator}: {name} is {tensor.dtype}; needed: {dtype}")


def check_places(operator: str, places: torch.Tensor | None, rows: int) -> None:
    """``places`` is one int64 a row: where in the packed row the operator's queries stand; ``None`` for all of them."""
    if places is not None:
        check_tensor(operator, "places", places, "[t]", (rows,), torch.int64)


def check_cumulative(operator: str, name: str, cumulative: torch.Tensor) -> None:
    """``cu_seqlens`` and its kin are one-dimensional int32 with at least one entry."""
    check_tensor(operator, name, cumulative, "[N + 1]", (None,), torch.int32)
    if cumulative.shape[0] == 0:
        raise ShapeError(f"{operator}: {name} is empty; needed: [N + 1], starting with 0")
