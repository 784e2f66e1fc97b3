import pytest
import torch

from glm5next_plugin.ops.hyper_connection import hc_contract, hc_expand, hc_post, hc_pre
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import assert_same_values_and_gradients, leaf, randomise, relative_error

NORM_EPS, HC_EPS, ITERS = 1e-5, 1e-6, 20


@pytest.fixture(params=[2, 4])
def module(request, hf, hf_config):
    """transformers' hyper-connection over 2 or 4 streams."""
    config = hf_config(hc_mult=request.param, hc_eps=HC_EPS, hc_sinkhorn_iters=ITERS, rms_norm_eps=NORM_EPS)
    return randomise(hf.Glm5NextTextHyperConnection(config))


def _random_mixes(n, *leading):
    return leaf(*leading, n), torch.rand(*leading, n, n).requires_grad_()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_pre_matches_transformers(module, scale):
    streams = leaf(2, 5, module.hc_mult, 48, scale=scale)
    inputs = [streams, module.fn, module.base, module.scale]
    x, post, comb = hc_pre(*inputs, NORM_EPS, HC_EPS, ITERS)
    expected_post, expected_comb, expected_x = module(streams)
    assert_same_values_and_gradients([x, post, comb], [expected_x, expected_post, expected_comb], inputs)


def test_whole_connection_matches_the_decoder_layer(module):
    """pre, a stand-in for the sub-layer, post: the two lines of transformers' decoder layer."""
    streams = leaf(2, 5, module.hc_mult, 48)
    inputs = [streams, module.fn, module.base, module.scale]
    x, post, comb = hc_pre(*inputs, NORM_EPS, HC_EPS, ITERS)
    found = hc_post(torch.sin(x), streams, post, comb)
    post, comb, x = module(streams)
    expected = post.unsqueeze(-1) * torch.sin(x).unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    assert_same_values_and_gradients([found], [expected], inputs)


def test_comb_mixes_from_its_first_axis_to_its_second():
    streams = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[0.25, 0.5], [2.0, 4.0]]])
    out = hc_post(torch.tensor([[100.0]]), streams, torch.tensor([[1.0, 3.0]]), comb)
    # out[0] = 1 * 100 + 0.25 * 1 + 2 * 10, out[1] = 3 * 100 + 0.5 * 1 + 4 * 10
    assert out.flatten().tolist() == [120.25, 340.5]


def test_zero_projection_gives_the_values_of_the_base():
    n, base = 2, torch.tensor([0.0, 100.0, 0.0, 100.0, 0.0, 0.0, 0.0, 0.0])
    x, post, comb = hc_pre(
        torch.tensor([[[2.0], [6.0]]]), torch.zeros(8, n), base, torch.ones(3), NORM_EPS, 1e-3, ITERS
    )
    torch.testing.assert_close(x, torch.tensor([[2 * 0.501 + 6 * 1.001]]))
    torch.testing.assert_close(post, torch.tensor([[1.0, 2.0]]))
    torch.testing.assert_close(comb, torch.full((1, 2, 2), 0.5), rtol=0, atol=1e-3)


def test_each_mix_has_its_own_scale():
    n, h = 2, 1
    fn, streams = torch.ones(8, n * h), torch.ones(1, n, h)
    x, post, _ = hc_pre(streams, fn, torch.zeros(8), torch.tensor([1.0, -1.0, 0.0]), 0.0, 0.0, ITERS)
    # the normalised streams are ones: every projection is 2, so pre = sigmoid(2) and post = 2 sigmoid(-2)
    torch.testing.assert_close(x, torch.tensor([[2 * 0.8807971]]))
    torch.testing.assert_close(post, torch.tensor([[0.2384058, 0.2384058]]))


def test_columns_of_comb_end_exact_and_rows_approximate():
    streams, fn = torch.randn(200, 4, 8), torch.randn(24, 32)
    _, _, comb = hc_pre(streams, fn, torch.randn(24), 3 * torch.ones(3), NORM_EPS, HC_EPS, ITERS)
    columns, rows = (comb.sum(-2) - 1).abs().max(), (comb.sum(-1) - 1).abs().max()
    assert columns < 3e-6 < 1e-4 < rows < 0.2


def test_norm_eps_is_inside_the_root():
    # mean square 1e-6, eps 1e-5: each normalised entry is 1e-3 / sqrt(1.1e-5) = 0.3015113; pre = sigmoid of their sum
    fn = torch.zeros(8, 2)
    fn[:2] = 1
    x, _, _ = hc_pre(torch.full((1, 2, 1), 1e-3), fn, torch.zeros(8), torch.ones(3), 1e-5, 0.0, ITERS)
    torch.testing.assert_close(x, torch.tensor([[2e-3 * 0.6463475]]), rtol=1e-5, atol=0)


def test_bf16_streams_mix_in_fp32_with_one_rounding():
    streams, y = torch.randn(30, 4, 16).bfloat16(), torch.randn(30, 16).bfloat16()
    post, comb = _random_mixes(4, 30)
    found = hc_post(y, streams, post, comb)
    in_fp32 = hc_post(y.float(), streams.float(), post, comb)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, in_fp32.bfloat16())


def test_mixing_in_the_dtype_of_the_streams_rounds_as_transformers():
    streams, y = torch.randn(30, 4, 16).bfloat16(), torch.randn(30, 16).bfloat16()
    post, comb = _random_mixes(4, 30)
    found = hc_post(y, streams, post, comb, mix_dtype=torch.bfloat16)
    expected = post.bfloat16().unsqueeze(-1) * y.unsqueeze(-2) + comb.bfloat16().transpose(-1, -2) @ streams
    assert torch.equal(found, expected)
    assert not torch.equal(found, hc_post(y, streams, post, comb))


def test_bf16_pre_computes_the_mixes_in_fp32():
    streams, fn = torch.randn(30, 4, 16).bfloat16(), torch.randn(24, 64).bfloat16()
    base, scale = torch.randn(24), torch.ones(3)
    x, post, comb = hc_pre(streams, fn, base, scale, NORM_EPS, HC_EPS, ITERS)
    wide = hc_pre(streams.float(), fn.float(), base, scale, NORM_EPS, HC_EPS, ITERS)
    assert (x.dtype, post.dtype, comb.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(x, wide[0].bfloat16())
    assert torch.equal(post, wide[1])
    assert torch.equal(comb, wide[2])


def test_one_token_does_not_change_another():
    streams, fn, base = torch.randn(6, 4, 16), torch.randn(24, 64), torch.randn(24)
    changed = streams.clone()
    changed[2] = 3 * torch.randn(4, 16)
    others = [0, 1, 3, 4, 5]
    before, after = (hc_pre(s, fn, base, torch.ones(3), NORM_EPS, HC_EPS, ITERS) for s in (streams, changed))
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[2], b[2])


@pytest.mark.parametrize("n", [1, 4])
def test_expansion_copies_and_contraction_averages_into_fresh_tensors(n):
    x = leaf(3, 2, 5)
    streams = hc_expand(x, n)
    assert streams.shape == (3, 2, n, 5)
    assert all(torch.equal(streams[..., i, :], x) for i in range(n))
    assert streams.data_ptr() != x.data_ptr() and streams.is_contiguous()
    weighed = streams * torch.arange(1.0, n + 1).view(n, 1)
    back = hc_contract(weighed)
    assert relative_error(back, x * (n + 1) / 2) < 1e-6
    assert back.data_ptr() != weighed.data_ptr()
    (gradient,) = torch.autograd.grad(back.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, (n + 1) / 2))


def test_contraction_in_bf16_rounds_once(hf):
    streams = torch.randn(7, 3, 4, 16).bfloat16()
    assert torch.equal(hc_contract(streams), hf.Glm5NextTextHyperHead()(streams))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(fn=torch.zeros(8, 3)), r"fn has shape \[8, 3\]; needed: \[\(2 \+ n\) \* n, n \* h\] = \[8, 6\]"),
        (dict(base=torch.zeros(4)), r"base has shape \[4\]; needed: .* = \[8\]"),
        (dict(scale=torch.zeros(1)), r"scale has shape \[1\]; needed: \[3\] = \[3\]"),
        (dict(sinkhorn_iters=0), "sinkhorn_iters is 0; needed: at least 1"),
    ],
)
def test_wrong_arguments_of_pre_are_refused(changes, message):
    arguments = dict(
        streams=torch.zeros(5, 2, 3),
        fn=torch.zeros(8, 6),
        base=torch.zeros(8),
        scale=torch.zeros(3),
        norm_eps=1e-5,
        hc_eps=1e-6,
        sinkhorn_iters=20,
    )
    with pytest.raises(ShapeError, match="hc_pre: " + message):
        hc_pre(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(y=torch.zeros(4, 3)), r"y has shape \[4, 3\]; needed: .* = \[5, 3\]"),
        (dict(comb=torch.zeros(5, 2, 3)), r"comb has shape \[5, 2, 3\]; needed: .* = \[5, 2, 2\]"),
        (dict(mix_dtype=torch.float16), "mix_dtype is torch.float16; needed: torch.float32 or torch.bfloat16"),
    ],
)
def test_wrong_arguments_of_post_are_refused(changes, message):
    arguments = dict(
        y=torch.zeros(5, 3).bfloat16(),
        streams=torch.zeros(5, 2, 3).bfloat16(),
        post=torch.zeros(5, 2),
        comb=torch.zeros(5, 2, 2),
    )
    with pytest.raises(ShapeError, match="hc_post: " + message):
        hc_post(**(arguments | changes))
