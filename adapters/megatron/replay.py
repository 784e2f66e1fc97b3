"""Choices of routers and indexers, recorded or repeated in the forward passes of a micro-batch.

What to do hangs on the micro-batch's ``PackedSeqParams``, which every layer gets, on every pipeline stage and in a
recomputed forward pass as in the first: so there is no queue that passes in another order could shift. megatron-core's
``RouterReplay`` works beside it (``moe_enable_routing_replay``); :func:`set_router_replay` fills it from records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import unwrap_model

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError
from glm5next_plugin.replay import Kind, ReplayRecord, kind_layers, packed_choices

from .packing import PackedTokens

_ATTRIBUTE = "_glm5next_replay"


class Replay:
    """What the layers of one micro-batch repeat and record.

    Attributes:
        choices: per kind, 0-based layer -> int32 ``[T, k]`` over the packed row of all ranks.
        recorded: likewise, of the tokens of this rank that made the choice: their packed places (``None`` for all) and
            int32 ``[t, k]``; ``None`` where nothing is recorded.
    """

    def __init__(self, choices: dict[Kind, dict[int, torch.Tensor]], record: bool):
        self.choices = choices
        self.recorded: dict[Kind, dict[int, tuple[torch.Tensor | None, torch.Tensor]]] | None = (
            {"routing": {}, "indexer": {}} if record else None
        )

    def choose(
        self, kind: Kind, layer: int, places: torch.Tensor | None, select: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The choice of this rank's tokens: the replayed rows, and where they are -1 what the model selects.

        Args:
            kind: of the choice.
            layer: 0-based.
            places: packed places of the tokens, int64 ``[t]``; ``None`` for all.
            select: the model's own choice, ``[t, k]``.
        """
        replayed = self.choices.get(kind, {}).get(layer)
        if replayed is None:
            chosen = select()
        else:
            own = select()
            replayed = replayed.to(own.device)
            replayed = (replayed if places is None else replayed[places]).to(own.dtype)
            chosen = torch.where((replayed == -1).all(-1, keepdim=True), own, replayed)
        if self.recorded is not None:
            self.recorded[kind][layer] = (places, chosen.detach().to(torch.int32))
        return chosen


def replay_of(packed_seq_params: PackedSeqParams | None) -> Replay | None:
    """What hangs on a micro-batch."""
    return getattr(packed_seq_params, _ATTRIBUTE, None)


def attach_replay(
    packed_seq_params: PackedSeqParams,
    input_ids: torch.Tensor,
    architecture: Architecture,
    *,
    routing: Sequence[ReplayRecord] = (),
    indexer: Sequence[ReplayRecord] = (),
    record: bool = False,
) -> None:
    """Make the forward passes that get these ``packed_seq_params`` repeat records, or record, or both.

    Call it on every rank; each of its layers takes what is its own.

    Args:
        packed_seq_params: of the micro-batch; pass the same object to the model.
        input_ids: ``[1, t]``, what this rank gives the model.
        architecture: of the model.
        routing, indexer: one record a document, in order; empty leaves the choice to the model. A record holds every
            layer of its kind.
        record: keep every choice for :func:`recorded`.

    Raises:
        InputError: a record that does not fit the row or lacks a layer; says how.
    """
    choices: dict[Kind, dict[int, torch.Tensor]] = {}
    row, cu_seqlens = _whole_row(packed_seq_params, input_ids)
    kinds: tuple[tuple[Kind, Sequence[ReplayRecord]], ...] = (("routing", routing), ("indexer", indexer))
    for kind, records in kinds:
        if not records:
            continue
        wrong = [record.kind for record in records if record.kind != kind]
        if wrong:
            raise InputError(f"a record of {wrong[0]} was given as {kind}")
        choices[kind] = packed_choices(records, row, cu_seqlens)
        missing = set(kind_layers(kind, architecture)) - set(choices[kind])
        if missing:
            raise InputError(f"{kind} records lack layers {sorted(missing)}; needed: all that choose")
    setattr(packed_seq_params, _ATTRIBUTE, Replay(choices, record))


def recorded(
    packed_seq_params: PackedSeqParams,
    input_ids: torch.Tensor,
    lengths: Sequence[int],
    kind: Kind,
    architecture: Architecture,
) -> list[ReplayRecord]:
    """Records of a micro-batch's documents, whole on every rank of its model-parallel groups (collective).

    Args:
        packed_seq_params, input_ids: as for :func:`attach_replay`, after the forward pass.
        lengths: tokens of each document without padding.
        kind: which choices.
        architecture: of the model.

    Raises:
        InputError: nothing was recorded, or layers are missing.
    """
    replay = replay_of(packed_seq_params)
    if replay is None or replay.recorded is None:
        raise InputError("nothing was recorded; needed: attach_replay(..., record=True) before the forward pass")
    row, cu_seqlens = _whole_row(packed_seq_params, input_ids)
    mine = {
        layer: (None if places is None else places.cpu(), rows.cpu())
        for layer, (places, rows) in replay.recorded[kind].items()
    }
    whole: dict[int, torch.Tensor] = {}
    for parts in _gathered(_gathered(_gathered([mine], _TP), _CP), _PP):
        for layer, (places, rows) in parts.items():
            target = whole.setdefault(layer, torch.full((row.shape[0], rows.shape[1]), -1, dtype=torch.int32))
            target[slice(None) if places is None else places] = rows
    layers = tuple(sorted(whole))
    if layers != kind_layers(kind, architecture):
        raise InputError(f"{kind} was recorded in layers {list(layers)}; needed: {kind_layers(kind, architecture)}")
    stacked = torch.stack([whole[layer] for layer in layers], dim=1)
    return [
        ReplayRecord.of(kind, row[start : start + length], stacked[start : start + length], architecture, layers)
        for start, length in zip(cu_seqlens, lengths, strict=False)
    ]


def set_router_replay(
    models: Sequence[Any],
    packed_seq_params: PackedSeqParams,
    input_ids: torch.Tensor,
    records: Sequence[ReplayRecord],
) -> None:
    """Fill megatron-core's ``RouterReplay`` of this rank's routers from routing records.

    Each call queues one more micro-batch for ``REPLAY_BACKWARD``: clear the queue after passes without a backward
    (``RouterReplay.clear_global_indices()``).

    Raises:
        InputError: routers without RouterReplay, or records that leave a token to the model, which RouterReplay cannot.
    """
    for document, record in enumerate(records):
        left = (record.choices == -1).all(-1).any(-1).nonzero().flatten().tolist()
        if left:
            raise InputError(
                f"routing record {document} leaves {len(left)} tokens to the model, first token {left[0]}; "
                "needed: a choice for each, as RouterReplay wants it (attach_replay does not)"
            )
    row, cu_seqlens = _whole_row(packed_seq_params, input_ids)
    choices = packed_choices(records, row, cu_seqlens)
    for model in unwrap_model(list(models)):
        for layer in model.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            if not isinstance(router.router_replay, RouterReplay):
                raise InputError("the routers have no RouterReplay; needed: moe_enable_routing_replay=True")
            places = _packed_tokens(packed_seq_params, input_ids).places_of_shard(router.tp_group)
            rows = choices[layer.layer_number - 1]
            rows = (rows if places is None else rows[places.cpu()]).to(input_ids.device, torch.int64)
            # rows of padding are nobody's: any experts do
            rows[(rows == -1).all(-1)] = torch.arange(rows.shape[1], device=rows.device)
            router.router_replay.set_target_indices(rows)


def _packed_tokens(packed_seq_params: PackedSeqParams, input_ids: torch.Tensor) -> PackedTokens:
    group = parallel_state.get_context_parallel_group()
    return PackedTokens.of(packed_seq_params, input_ids.shape[1], input_ids.shape[0], input_ids.device, group)


def _whole_row(packed_seq_params: PackedSeqParams, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Token ids of the packed row of all context parallel ranks, on the CPU, and its document boundaries."""
    tokens = _packed_tokens(packed_seq_params, input_ids)
    row = tokens.gather(input_ids[0].contiguous())
    return row.cpu(), tokens.cu_seqlens.tolist()


_TP = parallel_state.get_tensor_model_parallel_group
_CP = parallel_state.get_context_parallel_group
_PP = parallel_state.get_pipeline_model_parallel_group


def _gathered(parts: list[Any], group_of: Callable[[], torch.distributed.ProcessGroup]) -> list[Any]:
    """The parts of every rank of a group."""
    group = group_of()
    if group.size() == 1:
        return parts
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, parts, group=group)
    return [part for theirs in everyone for part in theirs]
