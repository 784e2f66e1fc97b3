"""Block-scaled FP8 as the release stores it: weight = q * scale, one fp32 scale a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glm5next_plugin.architecture import ConfigError

from .inventory import scale_shape


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, from ``quantization_config``; None where the config has none.

    Never guessed from shapes: a ragged edge would give another size.

    Raises:
        ConfigError: another quantisation than block-scaled e4m3 (a missing ``fmt`` means e4m3).
    """
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") != "fp8":
        raise ConfigError("quantization_config", quantisation, "quant_method 'fp8', or no quantization_config")
    if quantisation.get("fmt", "e4m3") != "e4m3":
        raise ConfigError("quantization_config.fmt", quantisation["fmt"], "'e4m3'")
    block = quantisation.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(n) is not int or n <= 0 for n in block):
        raise ConfigError("quantization_config.weight_block_size", block, "two positive integers, as [128, 128]")
    return tuple(block)


def dequantize_block(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The matrix that an FP8 weight stands for.

    Args:
        weight: ``[N, K]`` float8_e4m3fn.
        scale: ``[ceil(N / rows), ceil(K / columns)]`` fp32, to multiply with; the last block of each dimension may be
            ragged.
        block: rows and columns of a block.

    Returns:
        ``[N, K]`` fp32, exact but for the rounding of one fp32 product.

    Raises:
        ValueError: the scale does not have one entry a block.
    """
    wanted = scale_shape(tuple(weight.shape), block)
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"scale of shape {list(scale.shape)} for a weight of shape {list(weight.shape)}: blocks of {list(block)} "
            f"need {list(wanted)}"
        )
    rows, columns = weight.shape
    spread = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * spread
