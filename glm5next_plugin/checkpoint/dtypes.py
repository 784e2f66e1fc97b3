"""Dtypes of the tensors of a checkpoint: as headers spell them, and torch's."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
