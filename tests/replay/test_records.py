"""Records: what is kept, in how many bytes, and what is refused with its numbers."""

import pytest
import torch

from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes import variants
from glm5next_plugin.replay import ReplayRecord, join_layers, packed_choices

TINY = variants.tiny()  # 16 experts, 4 a token, MoE in layers 3 to 7; pools of 4, 4 a query, DSA in layers 3 and 7
FULL = variants.full()


def routing(tokens: int, layers: int = 5, experts: int = 16, k: int = 4) -> torch.Tensor:
    """Experts that encode layer and token."""
    token, layer, place = torch.meshgrid(torch.arange(tokens), torch.arange(layers), torch.arange(k), indexing="ij")
    return (3 * token + 5 * layer + place) % experts


def pools(tokens: int, layers: int = 2, kpool: int = 4, k: int = 4) -> torch.Tensor:
    """The last finished pools."""
    rows = []
    for token in range(tokens):
        finished = (token + 1) // kpool
        row = list(range(max(0, finished - k), finished))
        rows.append(row + [-1] * (k - len(row)))
    return torch.tensor(rows).unsqueeze(1).expand(-1, layers, -1).contiguous()


def test_ids_are_kept_in_the_smallest_dtype_that_holds_them():
    ids = torch.arange(9)
    assert ReplayRecord.of("routing", ids, routing(9), TINY).choices.dtype == torch.int8
    # ids above 255, which do not fit into a byte
    wide = routing(9, layers=42, experts=288, k=8) + 0
    wide[4, 7] = torch.arange(280, 288)
    record = ReplayRecord.of("routing", ids, wide, FULL)
    assert record.choices.dtype == torch.int16 and record.nbytes == 9 * 42 * 8 * 2
    assert record.choices[4, 7].tolist() == list(range(280, 288))
    assert torch.equal(record.choices.long(), wide)
    assert ReplayRecord.of("indexer", ids, pools(9), TINY).choices.dtype == torch.int8


def test_rows_of_all_layers_are_cut_to_those_that_choose():
    whole = torch.zeros(6, 8, 4, dtype=torch.int32)
    whole[:, 3:] = routing(6).int()
    record = ReplayRecord.of("routing", torch.arange(6), whole, TINY)
    assert record.layers == (3, 4, 5, 6, 7) and torch.equal(record.choices.long(), routing(6))


def test_the_last_token_of_a_rollout_is_left_to_the_model():
    record = ReplayRecord.of("routing", torch.arange(6), routing(5), TINY)
    assert torch.equal(record.choices[:5].long(), routing(5)) and (record.choices[5] == -1).all()


def test_pools_are_kept_ascending():
    shuffled = pools(21)
    shuffled[20] = torch.tensor([3, 1, 4, 2])
    record = ReplayRecord.of("indexer", torch.arange(21), shuffled, TINY)
    assert record.choices[20, 0].tolist() == [1, 2, 3, 4]
    assert record.choices[8, 1].tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("routing", lambda x: x[:19], "rows for 19 tokens; needed: 21, or 20 where the last"),
        ("routing", lambda x: torch.cat([x, x[:1]]), "rows for 22 tokens; needed: 21"),
        ("routing", lambda x: x[:, :4], r"shape \[21, 4, 4\]; needed: \[21, 8 layers, 4\]"),
        ("routing", lambda x: x[..., :3], r"shape \[21, 5, 3\]; needed: \[21, 5 layers, 4\]"),
        ("routing", lambda x: put(x, 16), "layer 4, token 9: found 16; needed: an expert from 0 to 15"),
        ("routing", lambda x: put(x, -1), "layer 4, token 9: found -1; needed: an expert"),
        ("routing", lambda x: put(x, int(x[9, 1, 1])), "layer 4, token 9: found .*; needed: each expert once"),
        ("indexer", lambda x: put(x, 2), "layer 7, token 9: found 2; needed: a pool of 4 tokens that is finished"),
        ("indexer", lambda x: put(x, -2), "layer 7, token 9: found -2"),
        ("indexer", lambda x: put(x, 1), "layer 7, token 9: found 1; needed: each pool once"),
        ("indexer", lambda x: put(x, -1), "layer 7, token 9: 1 pools; needed: 2, all that are finished or 4 of them"),
    ],
)
def test_a_record_that_cannot_be_is_refused_with_its_place(kind, change, message):
    made = routing(21) if kind == "routing" else pools(21)
    ReplayRecord.of(kind, torch.arange(21), made, TINY)
    with pytest.raises(InputError, match=message):
        ReplayRecord.of(kind, torch.arange(21), change(made.clone()), TINY)


def put(choices: torch.Tensor, value: int) -> torch.Tensor:
    choices[9, 1, 0] = value
    return choices


def test_rows_of_minus_one_are_the_models():
    made = pools(21)
    made[12] = -1
    assert (ReplayRecord.of("indexer", torch.arange(21), made, TINY).choices[12] == -1).all()


def test_packed_rows_stand_where_their_documents_do():
    row = torch.tensor([5, 6, 7, 0, 8, 9, 10, 0, 0])
    records = [ReplayRecord.of("routing", row[a:b], routing(b - a), TINY) for a, b in ((0, 3), (4, 7))]
    found = packed_choices(records, row, [0, 4, 8, 9])
    assert sorted(found) == [3, 4, 5, 6, 7] and found[5].dtype == torch.int32
    for place, layer in enumerate(range(3, 8)):
        assert torch.equal(found[layer][0:3].long(), routing(3)[:, place])
        assert torch.equal(found[layer][4:7].long(), routing(3)[:, place])
        assert (found[layer][[3, 7, 8]] == -1).all()


def test_a_record_of_another_sequence_is_refused_with_the_numbers():
    row = torch.arange(100, 112)
    made = ReplayRecord.of("routing", row, routing(12), TINY)
    with pytest.raises(InputError, match="differ at 12 of 12 tokens, first at token 0: recorded 100, found 101"):
        packed_choices([made], row + 1, [0, 12])
    changed = row.clone()
    changed[7] = 3
    with pytest.raises(InputError, match="differ at 1 of 12 tokens, first at token 7: recorded 107, found 3"):
        packed_choices([made], changed, [0, 12])
    with pytest.raises(InputError, match="record 0 has 12 tokens; its document has 8 with padding"):
        packed_choices([made], row, [0, 8, 12])
    with pytest.raises(InputError, match="2 routing records for 1 documents"):
        packed_choices([made, made], row, [0, 12])
    other = ReplayRecord.of("indexer", row, pools(12), TINY)
    with pytest.raises(InputError, match=r"record 1 is of indexer in layers \[3, 7\]; needed, as the first one"):
        packed_choices([made, other], torch.cat([row, row]), [0, 12, 24])


def test_stages_join_to_the_whole():
    ids = torch.arange(12)
    whole = ReplayRecord.of("routing", ids, routing(12), TINY)
    parts = [
        ReplayRecord.of("routing", ids, routing(12)[:, places], TINY, layers=layers)
        for places, layers in (([2, 3, 4], (5, 6, 7)), ([0, 1], (3, 4)))
    ]
    joined = join_layers(parts)
    assert joined.layers == whole.layers and torch.equal(joined.choices, whole.choices)
    with pytest.raises(InputError, match="layer 5 is in two routing records"):
        join_layers([parts[0], parts[0]])
