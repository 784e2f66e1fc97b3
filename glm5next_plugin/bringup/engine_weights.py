"""The tensors that a transformers model holds, under their released names.

The rollout side's own answer to which tensor is which. It shares nothing with the trainer's name table, so that a wrong
table there does not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

_RENAMED = (
    (".self_attn.forget_gate.", ".self_attn."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
)


def released_tensors(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(released name, tensor)`` for every entry of a model's ``state_dict()``; merged ones come apart.

    Three convolutions are merged along channels (q, k, v), the experts along a leading axis, gate above up.
    """
    for name, tensor in state.items():
        for ours, released in _RENAMED:
            name = name.replace(ours, released)
        if name.endswith(".self_attn.conv1d.weight"):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace("conv1d", f"{letter}_conv1d"), part
        elif name.endswith(".mlp.experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, weight in enumerate(tensor):
                gate, up = weight.chunk(2)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, weight in enumerate(tensor):
                yield f"{prefix}{expert}.down_proj.weight", weight
        else:
            yield name, tensor
