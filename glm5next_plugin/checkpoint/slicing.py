"""Some layers of a checkpoint as a checkpoint of their own, numbered anew from 0."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

from .inventory import LAYERS, split_layer
from .sources import Source, StoredSpec

Layers = tuple[int, ...]


def _four_layers(architecture: Architecture) -> Layers:
    """A dense and two MoE KDA layers, and a MoE DSA layer after them: 0, 4, 5 and 7 of the release."""
    kinds = list(enumerate(zip(architecture.attention_kinds, architecture.mlp_kinds, strict=True)))
    dense = [i for i, kind in kinds if kind == ("kda", "dense")][:1]
    moe = [i for i, kind in kinds if kind == ("kda", "moe") and dense and i > dense[0]][:2]
    sparse = [i for i, kind in kinds if kind == ("dsa", "moe") and moe and i > moe[-1]][:1]
    if len(dense) + len(moe) + len(sparse) < 4:
        raise InputError("4layer: the model lacks a dense KDA layer, then two MoE KDA layers, then a MoE DSA layer")
    return (*dense, *moe, *sparse)


PRESETS: dict[str, Callable[[Architecture], Layers]] = {
    "8layer": lambda architecture: tuple(range(8)),
    "4layer": _four_layers,
}


def parse_layers(text: str, architecture: Architecture) -> Layers:
    """Layers that a preset or a list names.

    Args:
        text: a preset's name, or numbers and runs, as ``0-7`` or ``0,4,5,7`` or ``0,4-7``.
        architecture: of the checkpoint.

    Raises:
        InputError: neither, a layer that the model lacks, or layers that do not ascend.
    """
    if text in PRESETS:
        layers = PRESETS[text](architecture)
    else:
        runs = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip()) for part in text.split(",")]
        if not all(runs):
            presets = " or ".join(PRESETS)
            raise InputError(f"layers {text!r}: needed: {presets}, or numbers and runs, as 0-7 or 0,4,5,7")
        layers = tuple(i for run in runs for i in range(int(run[1]), int(run[2] or run[1]) + 1))
    beyond = [i for i in layers if i >= architecture.num_hidden_layers]
    if beyond or not layers:
        last = architecture.num_hidden_layers - 1
        raise InputError(
            f"layers {text!r}: the model has the layers 0 to {last}" + (f", not {beyond}" if beyond else "")
        )
    if list(layers) != sorted(set(layers)):
        raise InputError(f"layers {text!r}: they must ascend, each once")
    return layers


def sliced_architecture(architecture: Architecture, layers: Layers, *, mtp: bool) -> Architecture:
    """The model of some layers: its config follows in every key that counts or lists layers.

    Args:
        architecture: of the whole model.
        layers: which to keep, ascending.
        mtp: whether the MTP layers stay.
    """
    changed = dataclasses.replace(
        architecture,
        num_hidden_layers=len(layers),
        attention_kinds=tuple(architecture.attention_kinds[i] for i in layers),
        mlp_kinds=tuple(architecture.mlp_kinds[i] for i in layers),
        num_nextn_predict_layers=architecture.num_nextn_predict_layers if mtp else 0,
    )
    return Architecture.from_config(changed.released_config())


class SlicedSource:
    """Some layers of a source, under the names that they have in the slice.

    Args:
        source: checked already.
        layers: which to keep, ascending.
        mtp: whether the MTP layers stay; they follow the last layer.

    Attributes:
        architecture: of the slice.
    """

    def __init__(self, source: Source, layers: Layers, *, mtp: bool = False):
        self._source = source
        self._layers = layers
        self.architecture = sliced_architecture(source.architecture, layers, mtp=mtp)
        self.fp8_block = source.fp8_block
        hidden, count = source.architecture.num_hidden_layers, source.architecture.num_nextn_predict_layers
        kept = (*layers, *(range(hidden, hidden + count) if mtp else ()))
        numbers = {old: new for new, old in enumerate(kept)}
        self._original: dict[str, str] = {}
        for name in source.names():
            number, below = split_layer(name)
            if number is None:
                self._original[name] = name
            elif number in numbers:
                self._original[f"{LAYERS}{numbers[number]}.{below}"] = name
        if mtp and not any(split_layer(name)[0] == hidden for name in self._original.values()):
            raise InputError("the checkpoint has no MTP tensors to keep")

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype for a model that loses no bit."""
        return self._source.dtype

    @property
    def companions(self) -> Path:
        """The directory with config.json, tokenizer and generation files of the source."""
        return self._source.companions

    def names(self) -> list[str]:
        """Names in the slice, in the source's order."""
        return list(self._original)

    def spec(self, name: str) -> StoredSpec:
        """Stored dtype and shape of a tensor."""
        return self._source.spec(self._original[name])

    def tensor(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a tensor, FP8 dequantised."""
        return self._source.tensor(self._original[name], rows, into=into)

    def quantised(
        self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 weight and scale as stored."""
        return self._source.quantised(self._original[name], rows, into=into)

    def check(self) -> None:
        """Check the whole source."""
        self._source.check()

    def identity(self) -> dict[str, Any]:
        """The source's, and which layers of it."""
        return self._source.identity() | {"layers": list(self._layers), "names": len(self._original)}


def describe(architecture: Architecture, layers: Sequence[int]) -> str:
    """The layers of a slice in a line: old number, attention and MLP of each."""
    return ", ".join(f"{i} {architecture.attention_kinds[i]}/{architecture.mlp_kinds[i]}" for i in layers)
