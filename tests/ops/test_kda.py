import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5next_plugin.ops.kda import kda, kda_gate, kda_recurrent, kda_step
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import (
    LENGTHS,
    assert_future_changes_nothing,
    assert_other_documents_keep_their_bits,
    assert_same_values_and_gradients,
    documents,
    leaf,
    packed,
    randomise,
    relative_error,
)

HEADS, KEY, VALUE = 2, 8, 6


def _inputs(tokens, lower_bound=-5.0, value=VALUE):
    """q, k, v, log decay and beta as the layer makes them, the last two as leaves."""
    log_decay = kda_gate(2 * torch.randn(tokens, HEADS, KEY), torch.randn(HEADS), torch.randn(HEADS * KEY), lower_bound)
    beta = torch.sigmoid(torch.randn(tokens, HEADS))
    return (
        leaf(tokens, HEADS, KEY),
        leaf(tokens, HEADS, KEY),
        leaf(tokens, HEADS, value),
        log_decay.requires_grad_(),
        beta.requires_grad_(),
    )


def _in_float64(q, k, v, log_decay, beta):
    """The definition for one document from a zero state, in fp64; shares nothing with the operator."""
    q, k, v, log_decay, beta = (x.detach().double() for x in (q, k, v, log_decay, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, outputs = torch.zeros(*k.shape[1:], v.shape[-1], dtype=torch.float64), []
    for t in range(q.shape[0]):
        state = torch.einsum("hk,hkv->hkv", log_decay[t].exp(), state)
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv,h->hkv", k[t], error, beta[t])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs), state


# ---------------------------------------------------------------------------------------------------------- gate
@pytest.mark.parametrize(
    ("A_log", "x", "expected"),
    [(0.0, 0.0, -2.5), (0.0, 1e4, -5.0), (0.0, -1e4, 0.0), (0.6931472, 1.0, -4.404), (0.0, 1.0, -3.6553)],
)
def test_gate_has_the_values_of_its_table(A_log, x, expected):
    """-5 is a scale of a sigmoid, no clamp (which would give -1 at x = 1) and no bound on a softplus."""
    raw = torch.full((1, 1, 1), x - 0.25)
    found = kda_gate(raw, torch.tensor([A_log]), torch.tensor([0.25]), -5.0)
    assert found.item() == pytest.approx(expected, abs=5e-4)


def test_gate_without_bound_is_a_softplus():
    # -exp(ln 2) * softplus(0) = -2 ln 2; far above zero softplus is the identity
    raw = torch.tensor([0.0, 1000.0, -1000.0]).view(3, 1, 1)
    found = kda_gate(raw, torch.tensor([0.6931472]), torch.zeros(1), None)
    torch.testing.assert_close(found.flatten(), torch.tensor([-1.3862944, -2000.0, 0.0]))


@pytest.mark.parametrize("lower_bound", [-5.0, -2.0, None])
def test_gate_matches_transformers(hf, hf_config, lower_bound):
    config = hf_config(linear_lower_bound=lower_bound)
    module = randomise(hf.Glm5NextTextForgetGate(config), scale=0.5)
    x = leaf(1, 9, config.hidden_size)
    raw = module.f_b_proj(module.f_a_proj(x)).view(9, config.linear_num_heads, config.linear_head_dim)
    found = kda_gate(raw, module.A_log, module.dt_bias, lower_bound)
    assert_same_values_and_gradients([found], [module(x).squeeze(0)], [x, module.A_log, module.dt_bias])


def test_gate_has_finite_gradients_at_the_extremes():
    for lower_bound in (-5.0, None):
        raw = torch.tensor([300.0, -300.0]).view(2, 1, 1).requires_grad_()
        kda_gate(raw, torch.zeros(1), torch.zeros(1), lower_bound).sum().backward()
        assert raw.grad.isfinite().all()


def test_gate_of_bf16_projections_is_fp32():
    raw = torch.randn(5, HEADS, KEY).bfloat16()
    found = kda_gate(raw, torch.randn(HEADS), torch.randn(HEADS * KEY), -5.0)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("A_log", "dt_bias", "message"),
    [
        (2, 2, r"kda_gate: dt_bias has shape \[2\]; needed: \[H \* D\] = \[16\]"),
        (16, 16, r"kda_gate: A_log has shape \[16\]; needed: \[H\] = \[2\]"),
    ],
)
def test_gate_refuses_a_bias_per_head_and_a_rate_per_channel(A_log, dt_bias, message):
    with pytest.raises(ShapeError, match=message):
        kda_gate(torch.zeros(5, 2, 8), torch.zeros(A_log), torch.zeros(dt_bias), -5.0)


def test_gate_refuses_a_bound_that_is_not_negative():
    with pytest.raises(ShapeError, match="lower_bound is 5.0; needed: a negative number or None"):
        kda_gate(torch.zeros(5, 2, 8), torch.zeros(2), torch.zeros(16), 5.0)


# ---------------------------------------------------------------------------------------------------------- core
def test_two_tokens_worked_by_hand():
    """One channel, unit q and k; the decay halves the state before the delta rule sees it.

    Token 1: S = 0 + 0.5 * (2 - 0) = 1. Token 2: S = 0.5 * 1 = 0.5, then 0.5 + 0.5 * (3 - 0.5) = 1.75.
    """
    ones = torch.full((2, 1, 1), 1e3)
    v, half = torch.tensor([2.0, 3.0]).view(2, 1, 1), torch.full((2, 1), 0.5)
    for operator in (kda, kda_recurrent):
        o, state = operator(ones, ones, v, torch.full((2, 1, 1), -0.6931472), half, packed(2), output_final_state=True)
        torch.testing.assert_close(o.flatten(), torch.tensor([1.0, 1.75]))
        torch.testing.assert_close(state.flatten(), torch.tensor([1.75]))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("length", LENGTHS)
def test_matches_transformers(hf, length, lower_bound):
    inputs = _inputs(length, lower_bound)
    state = leaf(1, HEADS, KEY, VALUE)
    expected, expected_state = hf.chunk_kimi_delta_attention(
        *(x.unsqueeze(0) for x in inputs), initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found = kda(*inputs, packed(length), state, output_final_state=True)
    assert_same_values_and_gradients(found, [expected.squeeze(0), expected_state], [*inputs, state])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 65])
def test_definition_matches_its_fp64_recurrence(length):
    inputs = _inputs(length)
    expected, expected_state = _in_float64(*inputs)
    for operator in (kda, kda_recurrent):
        found, state = operator(*inputs, packed(length), output_final_state=True)
        assert relative_error(found, expected) < 1e-6
        assert relative_error(state[0], expected_state) < 1e-6


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 27), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_chunks_equal_the_definition_for_any_documents(lengths, bounded, with_state):
    cu_seqlens = packed(*lengths)
    inputs = _inputs(int(cu_seqlens[-1]), -5.0 if bounded else None)
    state = leaf(len(lengths), HEADS, KEY, VALUE) if with_state else None
    found = kda(*inputs, cu_seqlens, state, output_final_state=True)
    expected = kda_recurrent(*inputs, cu_seqlens, state, output_final_state=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_gradients_of_packed_chunks_equal_the_definition():
    cu_seqlens = packed(1, 16, 0, 17, 3, 40, 8)
    inputs, state = _inputs(int(cu_seqlens[-1])), leaf(7, HEADS, KEY, VALUE)
    found = kda(*inputs, cu_seqlens, state, output_final_state=True)
    expected = kda_recurrent(*inputs, cu_seqlens, state, output_final_state=True)
    assert_same_values_and_gradients(found, expected, [*inputs, state])


def test_packed_documents_equal_each_alone():
    cu_seqlens = packed(1, 16, 0, 17, 3, 40, 8)
    inputs = _inputs(int(cu_seqlens[-1]))
    alone = [
        kda(*(x[where] for x in inputs), packed(where.stop - where.start), output_final_state=True)
        for where in documents(cu_seqlens)
    ]
    expected = [torch.cat([o for o, _ in alone]), torch.cat([state for _, state in alone])]
    assert_same_values_and_gradients(kda(*inputs, cu_seqlens, output_final_state=True), expected, inputs)


@pytest.mark.parametrize("changed", [0, 1, 3, 5])
def test_other_documents_keep_every_bit(changed):
    cu_seqlens = packed(1, 16, 17, 3, 40, 8)
    inputs = _inputs(int(cu_seqlens[-1]))

    def operator(q, k, v, log_decay, beta):
        return kda(q, k, v, -log_decay.abs(), beta, cu_seqlens)[0]

    assert_other_documents_keep_their_bits(operator, inputs, cu_seqlens, changed)


@pytest.mark.parametrize("position", [1, 7, 8, 13, 30])
def test_future_tokens_change_nothing(position):
    cu_seqlens = packed(31)

    def operator(q, k, v, log_decay, beta):
        return kda(q, k, v, -log_decay.abs(), beta, cu_seqlens)[0]

    assert_future_changes_nothing(operator, _inputs(31), position)


def test_strong_decay_neither_overflows_nor_hides_the_weak_decays_behind_it():
    q, k, v, _, beta = _inputs(24)
    log_decay = -0.01 * torch.rand(24, HEADS, KEY)
    log_decay[::5] = -3e4
    log_decay.requires_grad_()
    found, _ = kda(q, k, v, log_decay, beta, packed(24))
    expected, _ = _in_float64(q, k, v, log_decay, beta)
    assert relative_error(found, expected) < 1e-6
    for gradient in torch.autograd.grad(found.square().sum(), [q, k, v, log_decay, beta]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("cut", [1, 7, 8, 11, 32])
def test_state_continues_a_document(cut):
    inputs = _inputs(33)
    whole, whole_state = kda(*inputs, packed(33), output_final_state=True)
    _, state = kda(*(x[:cut] for x in inputs), packed(cut), output_final_state=True)
    rest, end = kda(*(x[cut:] for x in inputs), packed(33 - cut), state, output_final_state=True)
    assert relative_error(rest, whole[cut:]) < 1e-5
    assert relative_error(end, whole_state) < 1e-5


def test_steps_equal_the_packed_form():
    batch, length = 3, 21
    inputs = _inputs(batch * length)
    packed_out, packed_state = kda(*inputs, packed(*[length] * batch), output_final_state=True)
    state, outputs = torch.zeros(batch, HEADS, KEY, VALUE), []
    for token in zip(*(x.unflatten(0, (batch, length)).unbind(1) for x in inputs), strict=True):
        o, state = kda_step(*token, state)
        outputs.append(o)
    assert relative_error(torch.stack(outputs, dim=1).flatten(0, 1), packed_out) < 1e-5
    assert relative_error(state, packed_state) < 1e-5


def test_step_matches_transformers(hf):
    inputs, state = _inputs(4), torch.randn(4, HEADS, KEY, VALUE)
    expected, expected_state = hf.recurrent_kimi_delta_attention(
        *(x.unsqueeze(1) for x in inputs), initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    before = state.clone()
    found, new_state = kda_step(*inputs, state)
    assert relative_error(found, expected.squeeze(1)) < 1e-5
    assert relative_error(new_state, expected_state) < 1e-5
    assert torch.equal(state, before)


def test_l2_norm_has_its_eps_under_the_root():
    # k = (1e-3, 0): 1e-3 / sqrt(1e-6 + 1e-6); q is long, its norm 1; scale 2^-0.5; S = k * v with beta 1
    q, k = torch.tensor([[[1e3, 0.0]]]), torch.tensor([[[1e-3, 0.0]]])
    o, _ = kda(q, k, torch.ones(1, 1, 1), torch.zeros(1, 1, 2), torch.ones(1, 1), packed(1))
    torch.testing.assert_close(o.flatten(), torch.tensor([0.5]), rtol=1e-4, atol=0)


def test_bf16_rounds_the_output_once_and_keeps_the_state_fp32():
    q, k, v, log_decay, beta = (x.detach() for x in _inputs(30))
    rounded = [x.bfloat16() for x in (q, k, v)]
    found, state = kda(*rounded, log_decay, beta.bfloat16(), packed(30), output_final_state=True)
    wide, wide_state = kda(
        *(x.float() for x in rounded), log_decay, beta.bfloat16().float(), packed(30), output_final_state=True
    )
    assert (found.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found, wide.bfloat16())
    assert torch.equal(state, wide_state)


def test_step_in_bf16_rounds_the_output_once_and_keeps_the_state_fp32():
    q, k, v, log_decay, beta = (x.detach() for x in _inputs(4))
    rounded, state = [x.bfloat16() for x in (q, k, v)], torch.randn(4, HEADS, KEY, VALUE)
    found, new_state = kda_step(*rounded, log_decay, beta, state)
    wide, wide_state = kda_step(*(x.float() for x in rounded), log_decay, beta, state)
    assert (found.dtype, new_state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found, wide.bfloat16())
    assert torch.equal(new_state, wide_state)


def test_documents_without_tokens_keep_their_state():
    state = torch.randn(3, HEADS, KEY, VALUE)
    for operator in (kda, kda_recurrent):
        o, final = operator(*_inputs(0), packed(0, 0, 0), state, output_final_state=True)
        assert o.shape == (0, HEADS, VALUE)
        assert torch.equal(final, state)


def test_state_is_returned_only_on_request():
    assert kda(*_inputs(3), packed(3))[1] is None


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("k", torch.zeros(5, 2, 7), r"k has shape \[5, 2, 7\]; needed: \[T, H, K\] = \[5, 2, 8\]"),
        ("v", torch.zeros(4, 2, 6), r"v has shape \[4, 2, 6\]; needed: \[T, H, V\] = \[5, 2, any\]"),
        ("log_decay", torch.zeros(5, 2), r"log_decay has shape \[5, 2\]; needed: \[T, H, K\]"),
        ("log_decay", torch.zeros(5, 2, 8).bfloat16(), "log_decay is torch.bfloat16; needed: torch.float32"),
        ("beta", torch.zeros(5, 2, 1), r"beta has shape \[5, 2, 1\]; needed: \[T, H\] = \[5, 2\]"),
        ("initial_state", torch.zeros(1, 2, 6, 8), r"initial_state has shape .*; needed: .* = \[1, 2, 8, 6\]"),
        ("cu_seqlens", packed(4), "cu_seqlens goes from 0 to 4; needed: from 0 to the number of tokens .5."),
    ],
)
def test_wrong_arguments_are_refused(name, wrong, message):
    arguments = dict(zip(("q", "k", "v", "log_decay", "beta"), _inputs(5), strict=True), cu_seqlens=packed(5))
    for operator in (kda, kda_recurrent):
        with pytest.raises(ShapeError, match=message):
            operator(**(arguments | {name: wrong}))
