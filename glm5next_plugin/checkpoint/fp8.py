"""Block-scaled FP8 as the release stores it: weight = q * scale, one fp32 scale a block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from glm5next_plugin.architecture import ConfigError

from .inventory import TensorSpec, scale_shape

Block = tuple[int, int]

_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_SMALLEST = 2.0**-100  # 448 over anything much less is no fp32 number
# the value of each of the 256 codes; a look-up is twice as fast on a CPU as the cast
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def block_size(config: Mapping[str, Any]) -> Block | None:
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


def dequantize_block(weight: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
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
    matrix = torch.from_numpy(np.take(_VALUES, weight.contiguous().view(torch.uint8).numpy()))
    for rows, factors in zip(matrix.split(block[0]), scale.float(), strict=True):
        rows *= factors.repeat_interleave(block[1])[: weight.shape[1]]
    return matrix


def quantize_block(matrix: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weight and scale of a matrix: the largest magnitude of a block becomes the largest FP8 number, 448.

    Args:
        matrix: ``[N, K]``, finite.
        block: rows and columns of a block.

    Returns:
        ``[N, K]`` float8_e4m3fn and ``[ceil(N / rows), ceil(K / columns)]`` fp32, whose product is the matrix up to the
        rounding of FP8 (1/16 of a value, or 2^-10 of the scale where that is more). A block of zeros has scale 1.
    """
    rows, columns = matrix.shape
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(scale_shape((rows, columns), block), dtype=torch.float32)
    for number, start in enumerate(range(0, rows, block[0])):
        band = matrix[start : start + block[0]].float()
        columnwise = torch.nn.functional.pad(band.abs().amax(0), (0, -columns % block[1]))
        largest = columnwise.view(-1, block[1]).amax(1)
        # multiplied by 448 / largest and stored as its reciprocal, as transformers does it: equal to the bit
        factor = torch.where(largest > 0, _MAX / largest.clamp(min=_SMALLEST), 1.0)
        scale[number] = 1.0 / factor
        spread = factor.repeat_interleave(block[1])[:columns]
        quantised[start : start + block[0]] = (band * spread).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
    return quantised, scale


def quantization_config(expected: Mapping[str, TensorSpec], block: Block) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose matrices are FP8 where the inventory says so.

    Args:
        expected: the checkpoint's tensors.
        block: rows and columns of a block.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(_kept_modules(expected)),
    }


def _kept_modules(expected: Mapping[str, TensorSpec]) -> Iterable[str]:
    """Modules that stay BF16, as readers spell them: SGLang without ``language_model.``, transformers with it."""
    for name, spec in expected.items():
        if not spec.fp8 and len(spec.shape) == 2 and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            yield module
            if ".language_model." in module:
                yield module.replace(".language_model.", ".")
