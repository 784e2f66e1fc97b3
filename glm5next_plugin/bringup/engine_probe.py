"""Intermediate results of the transformers model, by the names of :mod:`.probe`."""

from __future__ import annotations

from typing import Any

import torch

from .probe import selected_mask


@torch.inference_mode()
def record(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run ``tokens`` ``[n, s]`` once, without a cache, and record."""
    recorded: dict[str, torch.Tensor] = {}
    text = model.model.language_model
    sizes = tokens.shape

    def keep_input(name: str):
        return lambda module, args, output: recorded.update({name: args[0].clone()})

    def keep_output(name: str):
        def hook(module, args, output):
            recorded[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    def keep_selection(name: str):
        return lambda module, args, output: recorded.update({name: selected_mask(output, sizes[1])})

    def keep_experts(name: str, experts: int):
        return lambda module, args, output: recorded.update({name: selected_mask(output[2].view(*sizes, -1), experts)})

    hooks = [
        (text.embed_tokens, keep_output("embedding")),
        (text.norm, keep_output("final_norm")),
        (model.lm_head, keep_output("logits")),
    ]
    for index, layer in enumerate(text.layers):
        name = f"layers.{index}"
        hooks += [
            (layer.input_layernorm, keep_input(f"{name}.attn_hc")),
            (layer.input_layernorm, keep_output(f"{name}.input_norm")),
            (layer.self_attn, keep_output(f"{name}.attention")),
            (layer.post_attention_layernorm, keep_input(f"{name}.ffn_hc")),
            (layer.post_attention_layernorm, keep_output(f"{name}.post_norm")),
            (layer.mlp, keep_output(f"{name}.mlp")),
        ]
        if hasattr(layer.self_attn, "indexer"):
            hooks.append((layer.self_attn.indexer, keep_selection(f"{name}.indexer")))
        if hasattr(layer.mlp, "gate"):
            hooks.append((layer.mlp.gate, keep_experts(f"{name}.router", layer.mlp.gate.num_experts)))
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return recorded
