import pytest
import torch

from glm5next_plugin.ops.indexer import selected_tokens
from glm5next_plugin.ops.rms_norm import rms_norm
from glm5next_plugin.ops.sparse_attention import sparse_mla, sparse_mla_step
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

HEADS, DIM, VALUE, RANK = 3, 8, 6, 10
SCALE = DIM**-0.5


def _random_pools(lengths, kpool, chosen):
    """Any ``chosen`` finished pools for each query (all if there are fewer), ascending."""
    rows = []
    for length in lengths:
        for t in range(length):
            ids = torch.randperm((t + 1) // kpool)[:chosen].sort().values
            rows.append(torch.nn.functional.pad(ids, (0, chosen - len(ids)), value=-1))
    return torch.stack(rows).to(torch.int32)


def _inputs(tokens):
    return leaf(tokens, HEADS, DIM), leaf(tokens, RANK), leaf(HEADS, DIM + VALUE, RANK)


def _by_gathering(q, latent, kv_b, tokens):
    """fp64 attention of each query over a list of tokens, one query after another."""
    q, latent, kv_b = q.double(), latent.double(), kv_b.double()
    outputs, denominators = [], []
    for t, row in enumerate(tokens.tolist()):
        chosen = latent[[token for token in row if token >= 0]]
        keys = torch.einsum("wr,hdr->hwd", chosen, kv_b[:, :DIM])
        values = torch.einsum("wr,hdr->hwd", chosen, kv_b[:, DIM:])
        logits = torch.einsum("hd,hwd->hw", q[t], keys) * SCALE
        outputs.append(torch.einsum("hw,hwd->hd", logits.softmax(-1), values))
        denominators.append(logits.logsumexp(-1))
    return torch.stack(outputs), torch.stack(denominators)


@pytest.mark.parametrize(("kpool", "topk"), [(4, 16), (16, 32)])
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_layer_matches_transformers(hf, hf_config, length, kpool, topk):
    """transformers' attention module with its own selection; here, its weights and that selection as pools."""
    config = hf_config(index_kpool=kpool, index_topk=topk)
    layer = randomise(hf.Glm5NextTextAttention(config, 3))
    x = leaf(1, length, config.hidden_size)
    expected, _, _ = layer(x, torch.ones(1, length, dtype=torch.bool))

    query_latent = layer.q_a_layernorm(layer.q_a_proj(x))
    theirs = layer.indexer(x, query_latent, torch.ones(1, length, dtype=torch.bool), None).squeeze(0)
    rows = []
    for t, row in enumerate(theirs.tolist()):
        ids = sorted({token // kpool for token in row if 0 <= token < (t + 1) // kpool * kpool})
        rows.append(ids + [-1] * (topk // kpool - len(ids)))
    latent = rms_norm(layer.kv_a_proj_with_mqa(x.squeeze(0)), layer.kv_a_layernorm.weight, config.rms_norm_eps)
    out, _ = sparse_mla(
        layer.q_b_proj(query_latent).view(length, config.num_attention_heads, config.qk_head_dim),
        latent,
        layer.kv_b_proj.weight.view(config.num_attention_heads, -1, config.kv_lora_rank),
        torch.tensor(rows, dtype=torch.int32),
        packed(length),
        kpool,
        config.qk_head_dim**-0.5,
    )
    found = layer.o_proj(out.flatten(1)).unsqueeze(0)
    inputs = [x, layer.kv_b_proj.weight, layer.kv_a_proj_with_mqa.weight, layer.kv_a_layernorm.weight]
    if length > 1:  # with one key the softmax is 1 and the query has no gradient
        inputs += [layer.q_b_proj.weight, layer.q_a_layernorm.weight]
    assert_same_values_and_gradients([found], [expected], inputs)


@pytest.mark.parametrize(("kpool", "chosen"), [(1, 3), (2, 2), (4, 3), (16, 1)])
def test_matches_gathering_in_fp64(kpool, chosen):
    lengths = (1, 5, 16, 37, 0, 2)
    cu_seqlens = packed(*lengths)
    inputs, pool_ids = _inputs(sum(lengths)), _random_pools(lengths, kpool, chosen)
    found = sparse_mla(*inputs, pool_ids, cu_seqlens, kpool, SCALE)
    expected = _by_gathering(*inputs, selected_tokens(pool_ids, cu_seqlens, kpool))
    assert found[0].dtype == found[1].dtype == torch.float32
    assert_same_values_and_gradients(found, expected, inputs)


def test_queries_of_some_tokens_get_what_all_would_give_them():
    lengths, kpool = (1, 5, 16, 37, 0, 2), 4
    places = torch.randperm(sum(lengths))[:29]
    (q, latent, kv_b), pool_ids = _inputs(sum(lengths)), _random_pools(lengths, kpool, 3)
    found = sparse_mla(q[places], latent, kv_b, pool_ids[places], packed(*lengths), kpool, SCALE, places)
    expected = [rows[places] for rows in sparse_mla(q, latent, kv_b, pool_ids, packed(*lengths), kpool, SCALE)]
    assert_same_values_and_gradients(found, expected, (q, latent, kv_b))
    assert torch.equal(found[0], expected[0])


def test_zero_query_averages_its_selection():
    latent = torch.tensor([[1.0], [2.0], [3.0], [4.0], [10.0]])
    kv_b = torch.tensor([[[7.0], [1.0]]])
    pool_ids = torch.tensor([[-1], [0], [0], [1], [0]], dtype=torch.int32)
    out, lse = sparse_mla(torch.zeros(5, 1, 1), latent, kv_b, pool_ids, packed(5), 2, 1.0)
    # pool of 2 tokens and the tail: 1 | (1, 2) | (1, 2) 3 | (3, 4) | (1, 2) 10
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 1.5, 2.0, 3.5, 13 / 3]))
    torch.testing.assert_close(lse.flatten().exp(), torch.tensor([1.0, 2.0, 3.0, 2.0, 3.0]))


def test_scale_multiplies_the_logits():
    # logits (0, 2 * ln 3 / 2): probabilities 1/4, 3/4
    q, kv_b = torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[[1.0], [1.0]]])
    latent = torch.tensor([[0.0], [1.0986123]])
    out, _ = sparse_mla(q, latent, kv_b, torch.tensor([[-1], [0]], dtype=torch.int32), packed(2), 2, 0.5)
    torch.testing.assert_close(out[1].flatten(), torch.tensor([0.75 * 1.0986123]))


def test_pool_that_is_not_selected_takes_no_part():
    (q, latent, kv_b), pool_ids = _inputs(12), _random_pools((12,), 4, 1)
    pool_ids[11] = 0
    before, _ = sparse_mla(q, latent, kv_b, pool_ids, packed(12), 4, SCALE)
    changed = latent.detach().clone()
    changed[4:11] = 50.0
    after, _ = sparse_mla(q, changed, kv_b, pool_ids, packed(12), 4, SCALE)
    assert torch.equal(before[11], after[11])
    gradient = torch.autograd.grad(before[11].sum(), latent)[0]
    assert (gradient[4:] == 0).all() and (gradient[:4] != 0).any()


def test_query_without_a_key_is_zero_and_has_finite_gradients():
    inputs = _inputs(8)
    out, lse = sparse_mla(*inputs, torch.full((8, 2), -1, dtype=torch.int32), packed(8), 4, SCALE)
    empty = torch.tensor([False, False, False, True] * 2)
    assert (out[empty] == 0).all() and (out[~empty] != 0).any()
    assert (lse[empty] == float("-inf")).all() and lse[~empty].isfinite().all()
    for gradient in torch.autograd.grad(out.sum() + lse[~empty].sum(), inputs):
        assert gradient.isfinite().all()


def test_packed_documents_equal_each_alone():
    lengths = (1, 5, 16, 37, 0, 2, 3)
    cu_seqlens, (q, latent, kv_b) = packed(*lengths), _inputs(64)
    pool_ids = _random_pools(lengths, 4, 2)
    alone = [
        sparse_mla(q[where], latent[where], kv_b, pool_ids[where], packed(where.stop - where.start), 4, SCALE)
        for where in documents(cu_seqlens)
    ]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    found = sparse_mla(q, latent, kv_b, pool_ids, cu_seqlens, 4, SCALE)
    assert_same_values_and_gradients(found, expected, [q, latent, kv_b])


@pytest.mark.parametrize("changed", [0, 1, 3])
def test_other_documents_keep_every_bit(changed):
    lengths = (1, 16, 9, 37, 12)
    cu_seqlens, (q, latent, kv_b) = packed(*lengths), _inputs(75)
    pool_ids = _random_pools(lengths, 4, 2)

    def operator(q, latent):
        return sparse_mla(q, latent, kv_b, pool_ids, cu_seqlens, 4, SCALE)[0]

    assert_other_documents_keep_their_bits(operator, [q, latent], cu_seqlens, changed)


@pytest.mark.parametrize("position", [1, 4, 10, 39])
def test_future_tokens_change_nothing(position):
    (q, latent, kv_b), pool_ids = _inputs(40), _random_pools((40,), 4, 3)

    def operator(q, latent):
        return sparse_mla(q, latent, kv_b, pool_ids, packed(40), 4, SCALE)[0]

    assert_future_changes_nothing(operator, [q, latent], position)


@pytest.mark.parametrize("kpool", [1, 4, 16])
def test_steps_equal_the_packed_form(kpool):
    """Every prefix of a document as a sequence of its own, over a cache whose rows are shuffled."""
    length, (q, latent, kv_b) = 37, _inputs(37)
    pool_ids = _random_pools((length,), kpool, 2)
    out, lse = sparse_mla(q, latent, kv_b, pool_ids, packed(length), kpool, SCALE)
    order = torch.randperm(50)[:length]
    cache = torch.full((50, RANK), float("nan")).index_copy(0, order, latent.detach())
    slot_table = order.to(torch.int32).expand(length, length)
    seq_lens = torch.arange(1, length + 1, dtype=torch.int32)
    step_out, step_lse = sparse_mla_step(q, cache, kv_b, pool_ids, slot_table, seq_lens, kpool, SCALE)
    assert relative_error(step_out, out) < 1e-5
    assert relative_error(step_lse, lse) < 1e-5


def test_unused_row_of_a_batch_of_steps_is_zero():
    q, latent, kv_b = _inputs(2)
    table = torch.zeros(2, 1, dtype=torch.int32)
    seq_lens, pool_ids = torch.tensor([0, 1], dtype=torch.int32), torch.full((2, 1), -1, dtype=torch.int32)
    out, lse = sparse_mla_step(q, latent, kv_b, pool_ids, table, seq_lens, 4, SCALE)
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all()
    assert (out[1] != 0).all() and lse[1].isfinite().all()


def test_bf16_computes_in_fp32_and_rounds_the_output_once():
    q, latent, kv_b = (x.detach().bfloat16() for x in _inputs(30))
    pool_ids = _random_pools((30,), 4, 2)
    out, lse = sparse_mla(q, latent, kv_b, pool_ids, packed(30), 4, SCALE)
    wide, wide_lse = sparse_mla(q.float(), latent.float(), kv_b.float(), pool_ids, packed(30), 4, SCALE)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.bfloat16())
    assert torch.equal(lse, wide_lse)


def test_no_tokens_give_no_rows():
    out, lse = sparse_mla(*_inputs(0), torch.zeros(0, 2, dtype=torch.int32), packed(0, 0), 4, SCALE)
    assert out.shape == (0, HEADS, VALUE) and lse.shape == (0, HEADS)


@pytest.mark.parametrize(("token", "pool", "finished"), [(6, 1, 1), (2, 0, 0), (7, -2, 2), (11, 9, 1)])
def test_pool_that_a_query_cannot_see_is_refused(token, pool, finished):
    """The second document starts at 8: at token 11 it has one finished pool."""
    pool_ids = torch.full((13, 2), -1, dtype=torch.int32)
    pool_ids[token, 1] = pool
    message = f"token {token} selects pool {pool}; needed: -1 or one of the {finished} pools of 4 tokens"
    with pytest.raises(ShapeError, match=message):
        sparse_mla(*_inputs(13), pool_ids, packed(8, 5), 4, SCALE)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("latent", torch.zeros(4, 10), r"latent has shape \[4, 10\]; needed: \[T, R\] = \[5, any\]"),
        ("kv_b", torch.zeros(3, 14, 9), r"kv_b has shape \[3, 14, 9\]; needed: .* = \[3, any, 10\]"),
        ("kv_b", torch.zeros(3, 8, 10), r"kv_b has 8 rows a head; needed: more than Dqk \(8\)"),
        ("pool_ids", torch.zeros(5, 2, dtype=torch.int64), "pool_ids is torch.int64; needed: torch.int32"),
        ("kpool", 0, "kpool is 0; needed: at least 1"),
        ("places", torch.arange(4), r"places has shape \[4\]; needed: \[t\] = \[5\]"),
        ("places", torch.arange(5, dtype=torch.int32), "places is torch.int32; needed: torch.int64"),
        ("places", torch.tensor([0, 1, 2, 3, 5]), "places name token 5; needed: 0 to 4"),
    ],
)
def test_wrong_arguments_are_refused(name, wrong, message):
    arguments = dict(
        zip(("q", "latent", "kv_b"), _inputs(5), strict=True),
        pool_ids=torch.full((5, 2), -1, dtype=torch.int32),
        cu_seqlens=packed(5),
        kpool=4,
        scale=SCALE,
    )
    with pytest.raises(ShapeError, match=message):
        sparse_mla(**(arguments | {name: wrong}))
