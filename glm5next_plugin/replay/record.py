"""The record of one sequence: a row of choices a token and layer, checked against the model."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

Kind = Literal["routing", "indexer"]
_DTYPES = (torch.int8, torch.int16, torch.int32)


def kind_layers(kind: Kind, architecture: Architecture) -> tuple[int, ...]:
    """0-based layers that make choices of this kind."""
    return architecture.moe_layers if kind == "routing" else architecture.dsa_layers


def kind_width(kind: Kind, architecture: Architecture) -> int:
    """Choices a token and layer: experts, or pools (the unfinished tail follows by rule)."""
    return architecture.num_experts_per_tok if kind == "routing" else architecture.index_pools


@dataclasses.dataclass(frozen=True)
class ReplayRecord:
    """Choices of one sequence. Build it with :meth:`of`, which checks and compacts.

    Attributes:
        kind: ``routing`` (expert ids) or ``indexer`` (pool ids within the sequence, ascending, -1 behind the last).
        token_ids: int32 ``[T]``, by which a record and a batch recognise each other.
        layers: 0-based layers of the model, ascending.
        choices: the smallest of int8, int16 and int32 that holds every id, ``[T, layers, k]``. A row of -1 leaves the
            choice to the model; for an indexer only where a pool is finished, since before there is none to choose.
    """

    kind: Kind
    token_ids: torch.Tensor
    layers: tuple[int, ...]
    choices: torch.Tensor

    @classmethod
    def of(
        cls,
        kind: Kind,
        token_ids: torch.Tensor,
        choices: torch.Tensor,
        architecture: Architecture,
        layers: tuple[int, ...] | None = None,
    ) -> ReplayRecord:
        """Check what was recorded, on any side, and keep it compactly.

        Args:
            kind: what was chosen.
            token_ids: any integer dtype ``[T]``.
            choices: any integer dtype ``[T, n, k]``, or ``[T - 1, n, k]`` from an engine that never ran the last token,
                whose choice is then the model's.
            architecture: the model.
            layers: the ``n`` layers; by default those of the kind, or all of the model's, of which the others' rows
                are ignored.

        Raises:
            InputError: another number of rows, layers or choices, or an id that cannot be; says where.
        """
        mine, width = kind_layers(kind, architecture), kind_width(kind, architecture)
        tokens = token_ids.shape[0]
        if layers is None:
            layers = (
                mine
                if choices.dim() != 3 or choices.shape[1] == len(mine)
                else tuple(range(architecture.num_hidden_layers))
            )
        if choices.dim() != 3 or choices.shape[1:] != (len(layers), width):
            raise InputError(
                f"{kind} record has shape {list(choices.shape)}; needed: [{tokens}, {len(layers)} layers, {width}]"
            )
        if choices.shape[0] not in (tokens, tokens - 1):
            raise InputError(
                f"{kind} record has rows for {choices.shape[0]} tokens; needed: {tokens}, or {tokens - 1} where the "
                "last one was never run"
            )
        kept = [place for place, layer in enumerate(layers) if layer in mine]
        layers = tuple(layers[place] for place in kept)
        if list(layers) != sorted(set(layers)):
            raise InputError(f"{kind} record has layers {list(layers)}; needed: ascending, each once")
        choices = choices[:, kept].to(device="cpu", dtype=torch.int64)
        choices = torch.nn.functional.pad(choices, (0, 0, 0, 0, 0, tokens - choices.shape[0]), value=-1)
        check = _check_routing if kind == "routing" else _check_pools
        check(choices, layers, architecture)
        if kind == "indexer":
            choices = _ascending(choices)
        return cls(kind, token_ids.to(device="cpu", dtype=torch.int32), layers, _compact(choices))

    @property
    def nbytes(self) -> int:
        """Size of the choices."""
        return self.choices.numel() * self.choices.element_size()

    def require_tokens(self, token_ids: torch.Tensor) -> None:
        """Check that a batch's sequence is the recorded one.

        Raises:
            InputError: another length, or another token; names the first.
        """
        found = token_ids.to(device="cpu", dtype=torch.int32)
        if found.shape != self.token_ids.shape:
            raise InputError(
                f"{self.kind} record of {self.token_ids.shape[0]} tokens came with a sequence of {found.shape[0]}"
            )
        differing = (found != self.token_ids).nonzero().flatten()
        if len(differing):
            place = int(differing[0])
            raise InputError(
                f"{self.kind} record and sequence differ at {len(differing)} of {len(found)} tokens, first at token "
                f"{place}: recorded {int(self.token_ids[place])}, found {int(found[place])}"
            )


def _compact(choices: torch.Tensor) -> torch.Tensor:
    largest = int(choices.max()) if choices.numel() else 0
    return choices.to(next(dtype for dtype in _DTYPES if largest <= torch.iinfo(dtype).max))


def _left_to_model(choices: torch.Tensor) -> torch.Tensor:
    """Rows of -1: bool ``[T, n]``."""
    return (choices == -1).all(-1)


def _check_routing(choices: torch.Tensor, layers: tuple[int, ...], architecture: Architecture) -> None:
    experts = architecture.n_routed_experts
    recorded = ~_left_to_model(choices).unsqueeze(-1)
    wrong = ((choices < 0) | (choices >= experts)) & recorded
    _refuse("routing", wrong, choices, layers, f"an expert from 0 to {experts - 1}")
    ordered = choices.sort(-1).values
    twice = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0)) & recorded
    _refuse("routing", twice, ordered, layers, "each expert once")


def _check_pools(choices: torch.Tensor, layers: tuple[int, ...], architecture: Architecture) -> None:
    kpool, width = architecture.index_kpool, architecture.index_pools
    finished = ((torch.arange(choices.shape[0]) + 1) // kpool).view(-1, 1, 1)
    wrong = (choices < -1) | (choices >= finished)
    _refuse("indexer", wrong, choices, layers, f"a pool of {kpool} tokens that is finished at its token")
    ordered = choices.sort(-1).values
    twice = torch.nn.functional.pad((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0), (1, 0))
    _refuse("indexer", twice, ordered, layers, "each pool once")
    count = (choices >= 0).sum(-1)
    short = (count != finished.squeeze(-1).clamp(max=width)) & ~_left_to_model(choices)
    if short.any():
        token, place = short.nonzero()[0].tolist()
        raise InputError(
            f"indexer record of layer {layers[place]}, token {token}: {int(count[token, place])} pools; needed: "
            f"{min(int(finished[token]), width)}, all that are finished or {width} of them"
        )


def _refuse(kind: Kind, wrong: torch.Tensor, choices: torch.Tensor, layers: tuple[int, ...], needed: str) -> None:
    if wrong.any():
        token, layer, place = wrong.nonzero()[0].tolist()
        raise InputError(
            f"{kind} record of layer {layers[layer]}, token {token}: found {int(choices[token, layer, place])}; "
            f"needed: {needed}"
        )


def _ascending(pools: torch.Tensor) -> torch.Tensor:
    behind = torch.iinfo(pools.dtype).max
    ordered = torch.where(pools < 0, behind, pools).sort(-1).values
    return torch.where(ordered == behind, -1, ordered)
