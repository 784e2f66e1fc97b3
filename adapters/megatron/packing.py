"""Between megatron-core's activations ``[s, b, c]`` and the packed rows ``[T, c]`` that the operators take."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from glm5next_plugin.errors import InputError

_CACHE = "_glm5next_packed_tokens"


@dataclasses.dataclass(frozen=True)
class PackedTokens:
    """Where the tokens of this rank's activations stand in the packed row of all documents.

    Under context parallel a rank holds two pieces of every document (zigzag): of ``2 * cp`` equal pieces the ones
    numbered ``r`` and ``2 * cp - 1 - r``. *Gathered* rows are those of all ranks after one another, *packed* rows the
    documents' tokens in order.

    Attributes:
        cu_seqlens: int32 ``[documents + 1]`` over the packed row of ``T`` tokens.
        batch: sequences of the activations (1 with packed documents).
        places: int64 ``[t]``, the packed place of each of this rank's tokens, sequence after sequence; ``None`` where a
            rank holds all of them in order.
        order: int64 ``[T]``, the gathered row of each packed token; ``None`` likewise.
        group: the context parallel group.
    """

    cu_seqlens: torch.Tensor
    batch: int
    places: torch.Tensor | None
    order: torch.Tensor | None
    group: torch.distributed.ProcessGroup

    @classmethod
    def of(
        cls,
        packed_seq_params: PackedSeqParams | None,
        sequence_length: int,
        batch_size: int,
        device: torch.device,
        group: torch.distributed.ProcessGroup,
    ) -> PackedTokens:
        """Read the documents of a forward pass.

        Without ``packed_seq_params`` every sequence of the batch is one document. With it, a document reaches to the
        start of the next one, so padding behind its tokens belongs to it (nothing looks ahead, so it changes nothing);
        rows behind the last boundary form one more document.

        Args:
            packed_seq_params: as verl and miles give it: boundaries over the tokens of all context parallel ranks.
            sequence_length: ``s``, tokens a sequence on this rank, whole over tensor parallel ranks.
            batch_size: ``b``.
            device: of the activations.
            group: context parallel group.

        Raises:
            InputError: another layout than ``thd``, packed rows with a batch, boundaries beyond the row, or a document
                that context parallel ranks cannot share.
        """
        key = (sequence_length, batch_size, device, group)
        cached = getattr(packed_seq_params, _CACHE, None)
        if cached is not None and cached[0] == key:
            return cached[1]
        cu_seqlens = _boundaries(packed_seq_params, sequence_length * group.size(), batch_size, device)
        places = order = None
        if group.size() > 1:
            ranks = zigzag_places(cu_seqlens.tolist(), group.size())
            places = ranks[group.rank()].to(device)
            order = torch.cat(ranks).argsort().to(device)
        found = cls(cu_seqlens, batch_size, places, order, group)
        if packed_seq_params is not None:
            setattr(packed_seq_params, _CACHE, (key, found))
        return found

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows ``[t, ...]`` to the packed rows of all ranks ``[T, ...]``; gradients are summed back."""
        if self.order is None:
            return rows
        return gather_from_sequence_parallel_region(rows, group=self.group)[self.order]

    def places_of_shard(self, tp_group: torch.distributed.ProcessGroup) -> torch.Tensor | None:
        """Packed places of this rank's sequence parallel shard ``[b * s / tp]``; ``None`` where it is everything."""
        if tp_group.size() == 1:
            return self.places
        tokens = int(self.cu_seqlens[-1]) if self.places is None else self.places.shape[0]
        places = torch.arange(tokens, device=self.cu_seqlens.device) if self.places is None else self.places
        return places.view(self.batch, tp_group.size(), -1)[:, tp_group.rank()].flatten()


def zigzag_places(cu_seqlens: list[int], ranks: int) -> list[torch.Tensor]:
    """Packed places of the tokens that each context parallel rank holds, int64 ``[t]`` a rank.

    Raises:
        InputError: a document whose length is no multiple of ``2 * ranks``.
    """
    places: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for document, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        if (end - start) % (2 * ranks):
            raise InputError(
                f"document {document} of the packed row has {end - start} tokens; needed: a multiple of {2 * ranks} "
                f"with context_parallel_size {ranks} (two equal pieces a rank; pad each document)"
            )
        pieces = torch.arange(start, end).chunk(2 * ranks) if end > start else ()
        for rank in range(ranks if pieces else 0):
            places[rank] += [pieces[rank], pieces[2 * ranks - 1 - rank]]
    return [torch.cat(mine) if mine else torch.zeros(0, dtype=torch.int64) for mine in places]


def _boundaries(
    packed_seq_params: PackedSeqParams | None, sequence_length: int, batch_size: int, device: torch.device
) -> torch.Tensor:
    if packed_seq_params is None:
        return torch.arange(0, (batch_size + 1) * sequence_length, sequence_length, dtype=torch.int32, device=device)
    if packed_seq_params.qkv_format != "thd":
        raise InputError(f"packed_seq_params.qkv_format is {packed_seq_params.qkv_format!r}; needed: 'thd'")
    if batch_size != 1:
        raise InputError(f"packed documents came with a batch of {batch_size}; needed: one packed row")
    boundaries = packed_seq_params.cu_seqlens_q_padded
    if boundaries is None:
        boundaries = packed_seq_params.cu_seqlens_q
    end = torch.full((1,), sequence_length, dtype=torch.int32, device=device)
    return torch.cat([boundaries.to(device=device, dtype=torch.int32), end])


def to_packed(hidden: torch.Tensor) -> torch.Tensor:
    """``[s, b, c]`` to ``[b * s, c]``, one sequence after another."""
    s, b, c = hidden.shape
    return hidden.transpose(0, 1).reshape(b * s, c)


def from_packed(rows: torch.Tensor, batch_size: int) -> torch.Tensor:
    """``[b * s, c]`` to a contiguous ``[s, b, c]``."""
    return rows.view(batch_size, rows.shape[0] // batch_size, -1).transpose(0, 1).contiguous()
