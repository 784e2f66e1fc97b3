import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5next_plugin.ops.packing import (
    cumulative_lengths,
    document_ids,
    group_by_length,
    pack,
    positions_in_document,
    ungroup,
    unpack,
    validate_cu_seqlens,
)
from glm5next_plugin.ops.validation import ShapeError, check_tensor


def test_left_and_right_padded_rows_pack_to_the_same_documents():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    padded = torch.arange(20).view(4, 5, 1)
    rows, cu_seqlens = pack(padded, mask)
    assert rows.flatten().tolist() == [2, 3, 4, 5, 6, 15, 16, 17, 18, 19]
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 3, 5, 5, 10]


def test_unpack_puts_every_token_back_and_fills_the_rest():
    mask = torch.tensor([[False, True, True], [True, False, False]])
    rows = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    padded = unpack(rows, mask, fill=-7)
    assert padded.squeeze(-1).tolist() == [[-7, 1, 2], [3, -7, -7]]
    padded.square().sum().backward()
    assert rows.grad.flatten().tolist() == [2, 4, 6]


def test_padding_between_tokens_is_refused():
    with pytest.raises(ShapeError, match="mask row 1 has padding between tokens"):
        pack(torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 0, 1]]))


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"mask has shape \[2, 4\]; needed: \[B, L\] = \[2, 3\]"):
        pack(torch.zeros(2, 3), torch.ones(2, 4))


def test_unpack_refuses_another_number_of_tokens():
    with pytest.raises(ShapeError, match="the mask has 2 tokens; needed: the 3 of the rows"):
        unpack(torch.zeros(3, 1), torch.tensor([[1, 1, 0]]))


def test_documents_and_positions_skip_empty_documents():
    cu_seqlens = torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)
    assert document_ids(cu_seqlens, 5).tolist() == [1, 1, 1, 3, 3]
    assert positions_in_document(cu_seqlens, 5).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 3], "goes from 1 to 3; needed: from 0 to the number of tokens"),
        ([0, 2], "goes from 0 to 2; needed: from 0 to the number of tokens"),
        ([0, 2, 1, 3], "falls from 2 to 1 at document 1"),
    ],
)
def test_wrong_boundaries_are_refused(values, message):
    with pytest.raises(ShapeError, match=message):
        validate_cu_seqlens(torch.tensor(values, dtype=torch.int32), 3)


def test_boundaries_of_another_dtype_are_refused():
    with pytest.raises(ShapeError, match="cu_seqlens is torch.int64; needed: torch.int32"):
        validate_cu_seqlens(torch.tensor([0, 3]), 3)


def test_message_names_operator_argument_and_both_shapes():
    with pytest.raises(ShapeError, match=r"^kda: q has shape \[2, 3\]; needed: \[T, H, K\] = \[2, any, 4\]$"):
        check_tensor("kda", "q", torch.zeros(2, 3), "[T, H, K]", (2, None, 4))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_groups_hold_every_token_once_within_a_factor_of_two(lengths):
    cu_seqlens = cumulative_lengths(torch.tensor(lengths))
    tokens = sum(lengths)
    rows = torch.arange(1, tokens + 1, dtype=torch.float32).unsqueeze(1)
    groups = group_by_length(cu_seqlens)
    padded = [group.pad(rows) for group in groups]
    for group, batch in zip(groups, padded, strict=True):
        real = (batch > 0).sum((1, 2))
        assert real.tolist() == [lengths[document] for document in group.documents.tolist()]
        assert 2 * int(real.min()) > group.length - 1
        assert (batch.squeeze(-1)[:, 0] == cu_seqlens[group.documents] + 1).all()
    if tokens:
        assert torch.equal(ungroup(groups, padded, tokens), rows)
    else:
        assert groups == []
