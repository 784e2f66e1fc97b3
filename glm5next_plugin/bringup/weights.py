"""Digests of weights, so that two processes can tell whether they hold the same ones without sending them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

VISION_PREFIX = "model.visual."


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's shape and values.

    The values are taken as fp32, which holds every bf16 value exactly: the same weight has the same digest whether a
    side keeps it in bf16 or, as transformers does with convolutions, in fp32.
    """
    values = tensor.detach().to("cpu", torch.float32)
    return hashlib.sha256(repr(tuple(values.shape)).encode() + values.numpy().tobytes()).hexdigest()


def unequal_tensors(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """Released names whose weights differ between trainer and engine, with what differs.

    Args:
        trainer: released name to digest, text model.
        engine: the same; its vision tensors are ignored, since the trainer has none.

    Returns:
        one line a tensor, sorted; empty if all agree.
    """
    lines = []
    for name in sorted({*trainer, *(name for name in engine if not name.startswith(VISION_PREFIX))}):
        if name not in engine:
            lines.append(f"{name}: the engine has no such tensor")
        elif name not in trainer:
            lines.append(f"{name}: the trainer has no such tensor")
        elif trainer[name] != engine[name]:
            lines.append(f"{name}: the engine holds other values than the trainer")
    return lines
