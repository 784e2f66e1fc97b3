"""Intermediate results of a Megatron model, by the names of :mod:`glm5next_plugin.bringup.probe`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.bringup.probe import selected_mask
from glm5next_plugin.ops.indexer import selected_tokens


@contextlib.contextmanager
def recording(
    models: list[Any], architecture: Architecture, samples: int, length: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Record the one forward of ``[samples, length]`` tokens that happens inside, without gradient.

    Collective over tensor parallel ranks: sequence parallel shards are gathered.
    """
    recorded: dict[str, torch.Tensor] = {}
    handles = []

    def keep(module: torch.nn.Module, name: str, take: Callable[[tuple, Any], torch.Tensor]) -> None:
        def hook(module, args, output):
            recorded[name] = take(args, output).detach().clone()

        handles.append(module.register_forward_hook(hook))

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        """``[s / tp, b, ...]`` to ``[b, s, ...]``."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden)
        return hidden.transpose(0, 1)

    def argument(args: tuple, output: Any) -> torch.Tensor:
        return whole(args[0])

    def result(args: tuple, output: Any) -> torch.Tensor:
        return whole(output[0] if isinstance(output, tuple) else output)

    def selection(args: tuple, pool_ids: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(0, samples * length, length)
        boundaries = torch.cat([starts, starts.new_tensor([samples * length])]).to(torch.int32)
        positions = selected_tokens(pool_ids, boundaries, architecture.index_kpool).view(samples, length, -1)
        within = torch.where(positions < 0, -1, positions - starts.view(-1, 1, 1))
        return selected_mask(within, length)

    def experts(args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        routing_map = output[1]
        rows = routing_map.view(-1, samples, routing_map.shape[-1])
        return whole(rows.float()).bool()

    for model in unwrap_model(models):
        if model.pre_process:
            keep(model.embedding, "embedding", result)
        for layer in model.decoder.layers:
            name = f"layers.{layer.layer_number - 1}"
            keep(layer.input_layernorm, f"{name}.attn_hc", argument)
            keep(layer.input_layernorm, f"{name}.input_norm", result)
            keep(layer.self_attention, f"{name}.attention", result)
            keep(layer.pre_mlp_layernorm, f"{name}.ffn_hc", argument)
            keep(layer.pre_mlp_layernorm, f"{name}.post_norm", result)
            keep(layer.mlp, f"{name}.mlp", result)
            if hasattr(layer.self_attention, "indexer"):
                keep(layer.self_attention.indexer, f"{name}.indexer", selection)
            if hasattr(layer.mlp, "router"):
                keep(layer.mlp.router, f"{name}.router", experts)
        if model.post_process:
            keep(model.decoder.final_layernorm, "final_norm", result)
            keep(model, "logits", lambda args, logits: logits[..., : architecture.vocab_size])
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
