"""Packed documents as verl and miles hand them to the model, worked out here by hand."""

from __future__ import annotations

import dataclasses

import torch

FORMS = ("real", "verl", "miles", "tail")


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Documents of given lengths in one packed row.

    Attributes:
        documents: token ids ``[length]`` each.
        form: ``real``: no padding, boundaries of the tokens; ``verl``: each document padded with id 0 to
            ``multiple``, real boundaries and padded ones; ``miles``: each document padded, padded boundaries only;
            ``tail``: no padding between documents, the row padded at its end, behind the last boundary.
        multiple: of which padded lengths are.
    """

    documents: list[torch.Tensor]
    form: str = "real"
    multiple: int = 1

    def padded_lengths(self) -> list[int]:
        lengths = [len(document) for document in self.documents]
        if self.form in ("verl", "miles"):
            return [-(-length // self.multiple) * self.multiple for length in lengths]
        tail = -sum(lengths) % self.multiple if self.form == "tail" else 0
        return [*lengths, tail] if tail else lengths

    def row(self) -> torch.Tensor:
        """Token ids of the packed row ``[T]``."""
        lengths = self.padded_lengths()
        row = torch.zeros(sum(lengths), dtype=torch.int64)
        for document, start in zip(self.documents, self.starts(), strict=True):
            row[start : start + len(document)] = document
        return row

    def starts(self) -> list[int]:
        """Where each document starts in the packed row."""
        lengths = self.padded_lengths()
        return [sum(lengths[:i]) for i in range(len(self.documents))]

    def real_places(self) -> torch.Tensor:
        """Packed places of the tokens that are no padding, document after document."""
        return torch.cat(
            [torch.arange(start, start + len(d)) for d, start in zip(self.documents, self.starts(), strict=True)]
        )

    def places(self, rank: int, ranks: int) -> torch.Tensor:
        """Packed places that a context parallel rank holds: pieces ``rank`` and ``2 * ranks - 1 - rank`` of each."""
        if ranks == 1:
            return torch.arange(sum(self.padded_lengths()))
        mine, start = [], 0
        for length in self.padded_lengths():
            piece = length // (2 * ranks)
            assert piece * 2 * ranks == length
            for number in (rank, 2 * ranks - 1 - rank):
                mine += range(start + number * piece, start + (number + 1) * piece)
            start += length
        return torch.tensor(mine)

    def parameters(self):
        """PackedSeqParams over the tokens of all context parallel ranks."""
        from megatron.core.packed_seq_params import PackedSeqParams

        real = torch.tensor([0, *(len(document) for document in self.documents)]).cumsum(0).to(torch.int32)
        padded = torch.tensor([0, *self.padded_lengths()]).cumsum(0).to(torch.int32)
        boundaries = {"real": real, "tail": real, "verl": real, "miles": padded}[self.form]
        both = padded if self.form == "verl" else None
        longest = max(self.padded_lengths())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            cu_seqlens_q_padded=both,
            cu_seqlens_kv_padded=both,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
