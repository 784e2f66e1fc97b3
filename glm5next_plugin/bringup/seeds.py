"""Random streams of a run."""

from __future__ import annotations

import hashlib
from typing import Literal


def stream_seed(seed: int, step: int, purpose: Literal["prompts", "sampling"]) -> int:
    """Seed of one generator: unrelated for another run, step or purpose, so that no answer follows from its prompt."""
    text = f"{seed} {step} {purpose}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
