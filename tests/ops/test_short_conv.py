import pytest
import torch

from glm5next_plugin.ops.short_conv import short_conv, short_conv_step
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import (
    LENGTHS,
    assert_future_changes_nothing,
    assert_other_documents_keep_their_bits,
    assert_same_values_and_gradients,
    documents,
    leaf,
    packed,
    relative_error,
)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_matches_transformers(hf, length, width):
    x, weight = leaf(length, 6), leaf(6, width)
    expected = hf.causal_conv1d_fn(x.T.unsqueeze(0), weight, activation="silu").squeeze(0).T
    assert_same_values_and_gradients([short_conv(x, weight, packed(length))], [expected], [x, weight])


def test_last_tap_is_the_token_itself_and_documents_start_from_zero():
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    weight = torch.tensor([[0.25, 10.0]])
    # document of 3: 10 * 1, 10 * 2 + 1 / 4, 10 * 3 + 2 / 4; document of 1: 10 * 4
    found = short_conv(x, weight, packed(3, 1))
    torch.testing.assert_close(found.flatten(), torch.nn.functional.silu(torch.tensor([10.0, 20.25, 30.5, 40.0])))


def test_packed_documents_equal_each_alone():
    cu_seqlens = packed(1, 5, 0, 2, 3, 4, 17)
    x, weight = leaf(int(cu_seqlens[-1]), 6), leaf(6, 4)
    alone = torch.cat(
        [short_conv(x[where], weight, packed(where.stop - where.start)) for where in documents(cu_seqlens)]
    )
    assert_same_values_and_gradients([short_conv(x, weight, cu_seqlens)], [alone], [x, weight])


@pytest.mark.parametrize("changed", [0, 2, 5])
def test_other_documents_keep_every_bit(changed):
    cu_seqlens, weight = packed(1, 5, 2, 3, 4, 17), torch.randn(6, 4)
    x = torch.randn(int(cu_seqlens[-1]), 6)
    assert_other_documents_keep_their_bits(lambda x: short_conv(x, weight, cu_seqlens), [x], cu_seqlens, changed)


def test_nan_stays_in_its_document():
    x = torch.ones(6, 2)
    x[2] = float("nan")
    found = short_conv(x, torch.ones(2, 4), packed(3, 3))
    assert found[2].isnan().all()
    assert found[:2].isfinite().all() and found[3:].isfinite().all()


def test_future_tokens_change_nothing():
    weight, cu_seqlens = torch.randn(6, 4), packed(20)
    assert_future_changes_nothing(lambda x: short_conv(x, weight, cu_seqlens), [torch.randn(20, 6)], 9)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9])
def test_state_continues_a_document(cut):
    x, weight = torch.randn(12, 6), torch.randn(6, 4)
    whole = short_conv(x, weight, packed(12))
    state = torch.nn.functional.pad(x[:cut], (0, 0, 3, 0))[-3:].T.unsqueeze(0)
    assert relative_error(short_conv(x[cut:], weight, packed(12 - cut), state), whole[cut:]) < 1e-6


def test_states_of_packed_documents_have_gradients_and_do_not_mix():
    cu_seqlens = packed(2, 0, 5)
    x, weight, state = leaf(7, 6), leaf(6, 4), leaf(3, 6, 3)
    alone = torch.cat(
        [
            short_conv(x[where], weight, packed(where.stop - where.start), state[i : i + 1])
            for i, where in enumerate(documents(cu_seqlens))
        ]
    )
    assert_same_values_and_gradients([short_conv(x, weight, cu_seqlens, state)], [alone], [x, weight, state])


@pytest.mark.parametrize("width", [2, 4])
def test_steps_equal_the_packed_form(width):
    x, weight = torch.randn(9, 3, 6), torch.randn(6, 1, width)
    state, outputs = torch.zeros(3, 6, width - 1), []
    for token in x:
        y, state = short_conv_step(token, state, weight)
        outputs.append(y)
    for sequence in range(3):
        whole = short_conv(x[:, sequence], weight, packed(9))
        assert relative_error(torch.stack(outputs)[:, sequence], whole) < 1e-6
    assert torch.equal(state, x[-(width - 1) :].permute(1, 2, 0))


def test_step_matches_transformers(hf):
    x, state, weight = torch.randn(3, 6), torch.randn(3, 6, 3), torch.randn(6, 4)
    theirs = state.clone()
    expected = hf.causal_conv1d_update(x.unsqueeze(-1), theirs, weight, activation="silu").squeeze(-1)
    found, new_state = short_conv_step(x, state, weight)
    assert relative_error(found, expected) < 1e-6
    assert torch.equal(new_state, theirs)


def test_step_leaves_the_old_state_alone():
    state = torch.zeros(1, 2, 3)
    short_conv_step(torch.ones(1, 2), state, torch.ones(2, 4))
    assert (state == 0).all()


def test_bf16_computes_in_fp32_and_rounds_once():
    x, weight = torch.randn(30, 6).bfloat16(), torch.randn(6, 4)
    found = short_conv(x, weight, packed(13, 17))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, short_conv(x.float(), weight, packed(13, 17)).bfloat16())
    y, _ = short_conv_step(x[:3], torch.zeros(3, 6, 3), weight)
    assert y.dtype == torch.bfloat16


def test_no_tokens_give_no_rows():
    assert short_conv(torch.zeros(0, 6), torch.randn(6, 4), packed(0, 0)).shape == (0, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(weight=torch.zeros(5, 4)), r"weight has shape \[5, 4\]; needed: \[C, W\] = \[6, any\]"),
        (dict(weight=torch.zeros(6, 2, 4)), r"weight has shape \[6, 2, 4\]; needed: \[C, 1, W\] = \[6, 1, any\]"),
        (dict(weight=torch.zeros(6, 1)), "weight has width 1; needed: at least 2"),
        (dict(initial_state=torch.zeros(1, 6, 4)), r"initial_state has shape .*; needed: .* = \[2, 6, 3\]"),
        (dict(cu_seqlens=packed(3, 4)), "cu_seqlens goes from 0 to 7; needed: from 0 to the number of tokens .8."),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    arguments = dict(x=torch.zeros(8, 6), weight=torch.zeros(6, 4), cu_seqlens=packed(3, 5)) | changes
    with pytest.raises(ShapeError, match=message):
        short_conv(**arguments)
