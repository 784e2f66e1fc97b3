"""Dtypes of the tensors of a checkpoint: as headers spell them, and torch's."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Those that weights have."""

STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""All that a checkpoint of a training framework may hold."""
