"""The three spellings of tensor names; inside the project only the released one is used.

* **released**: ``model.language_model.layers.0.self_attn.A_log`` (see :mod:`.inventory`);
* **transformers**: names of the modules of transformers' model, with experts and convolutions merged;
* **text-only**: either of the two without ``language_model``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from glm5next_plugin.architecture import MAX_EXPERTS

Spelling = Literal["released", "transformers", "text-only"]

# text-only -> released, at the start of a name
_PREFIXES = {
    "model.layers.": "model.language_model.layers.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.norm.": "model.language_model.norm.",
}

# transformers -> released, below a layer
_RENAMED = {
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attn.forget_gate.f_a_proj.weight": "self_attn.f_a_proj.weight",
    "self_attn.forget_gate.f_b_proj.weight": "self_attn.f_b_proj.weight",
    "self_attn.forget_gate.A_log": "self_attn.A_log",
    "self_attn.forget_gate.dt_bias": "self_attn.dt_bias",
}

# transformers -> released parts, below a layer: the parts lie after one another along the dimension (of one expert)
_CONCATENATED = {
    "self_attn.conv1d.weight": (
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
    ),
}
# the first dimension counts experts; the parts lie along the second
_STACKED_EXPERTS = {
    "mlp.experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "mlp.experts.down_proj": ("down_proj.weight",),
}

_LAYER = re.compile(r"model\.language_model\.layers\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Part:
    """A released tensor within a stored one.

    Attributes:
        name: released name.
        start: elements of the stored tensor before it; the part's own follow without a gap.
        shape: shape of the part.
    """

    name: str
    start: int
    shape: tuple[int, ...]


def spelling_of(stored: str) -> frozenset[Spelling]:
    """Spellings that a stored name shows; empty where all spell it alike."""
    prefixed = _with_prefix(stored)
    found: set[Spelling] = set()
    if prefixed != stored:
        found.add("text-only")
    below = _below_layer(prefixed)
    if below in _RENAMED or below in _CONCATENATED or below in _STACKED_EXPERTS:
        found.add("transformers")
    return frozenset(found)


def released_parts(stored: str, shape: tuple[int, ...]) -> list[Part]:
    """The released tensors that a stored tensor holds.

    Args:
        stored: name in any spelling; a name that no spelling knows comes back as it is.
        shape: shape of the stored tensor.

    Raises:
        ValueError: the shape of a merged tensor does not divide into its parts.
    """
    name = _with_prefix(stored)
    below = _below_layer(name)
    layer = name.removesuffix(below)
    if below in _RENAMED:
        return [Part(layer + _RENAMED[below], 0, shape)]
    if below in _CONCATENATED:
        return _parts([layer + part for part in _CONCATENATED[below]], shape, 0)
    if below in _STACKED_EXPERTS and shape and (0 in shape or shape[0] > MAX_EXPERTS):
        raise ValueError(f"shape {list(shape)} is none of stacked experts")
    if below in _STACKED_EXPERTS:
        names = [
            f"{layer}mlp.experts.{expert}.{part}"
            for expert in range(shape[0] if shape else 0)
            for part in _STACKED_EXPERTS[below]
        ]
        return _parts(names, shape, 1)
    return [Part(name, 0, shape)]


def _parts(names: list[str], shape: tuple[int, ...], dim: int) -> list[Part]:
    """Equal parts along a dimension; dimensions before it count parts and are none of theirs."""
    blocks = math.prod(shape[:dim])
    if len(shape) <= dim or not blocks or shape[dim] % (len(names) // blocks):
        parts = len(names) // blocks if blocks else 0
        raise ValueError(f"shape {list(shape)} does not divide into {parts} parts along dimension {dim}")
    of_part = (shape[dim] * blocks // len(names), *shape[dim + 1 :])
    return [Part(name, number * math.prod(of_part), of_part) for number, name in enumerate(names)]


def _with_prefix(stored: str) -> str:
    for text_only, released in _PREFIXES.items():
        if stored.startswith(text_only):
            return released + stored.removeprefix(text_only)
    return stored


def _below_layer(name: str) -> str:
    match = _LAYER.match(name)
    return name[match.end() :] if match else ""
