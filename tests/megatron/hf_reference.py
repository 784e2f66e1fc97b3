"""Logits and gradients of the transformers model in fp32, one document at a time, by released tensor name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from tests import hf_oracle


def load(checkpoint: Path):
    """The HF model in fp32 with eager attention."""
    return hf_oracle.modeling().Glm5NextForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )


def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """``[b, s]`` token ids to ``[b, s, vocab]``."""
    return model(input_ids=tokens, use_cache=False).logits


def gradients(model, scratch: Path) -> dict[str, torch.Tensor]:
    """Gradients by released name: transformers itself writes them as if they were weights. Consumes the model."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(scratch)
    found = {}
    for file in sorted(scratch.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found.update({name: tensors.get_tensor(name) for name in tensors.keys()})
    return found
