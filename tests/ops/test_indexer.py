import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5next_plugin.ops.indexer import (
    key_norm,
    pool_keys,
    pool_keys_step,
    select_pools,
    select_pools_step,
    selected_positions,
    selected_tokens,
)
from glm5next_plugin.ops.packing import pack, positions_in_document
from glm5next_plugin.ops.validation import ShapeError
from tests.ops.comparing import LENGTHS, documents, packed, randomise, relative_error

HEADS, DIM = 4, 16


def _indexer(hf, hf_config, kpool, topk):
    return randomise(hf.Glm5NextTextIndexer(hf_config(index_kpool=kpool, index_topk=topk), 3))


def _pooled(indexer, x, cu_seqlens):
    key = key_norm(indexer.wk(x), indexer.k_norm.weight, indexer.k_norm.bias)
    gate = x @ indexer.index_kpool_compress_gate.T
    return pool_keys(key, gate, indexer.index_kpool_compress_ape, cu_seqlens)


def _select(indexer, x, latent, cu_seqlens):
    """The indexer of a layer, from the operators."""
    pooled, cu_pools = _pooled(indexer, x, cu_seqlens)
    q = indexer.wq_b(latent).view(-1, HEADS, DIM)
    weights = indexer.weights_proj(x) * HEADS**-0.5
    return select_pools(q, pooled, weights, cu_seqlens, cu_pools, indexer.index_kpool, indexer.index_topk)


@torch.no_grad()
def _margins(indexer, x, latent):
    """For each query of one document, fp64: how far the last selected pool is from the first that is left out.

    Infinite where every candidate is selected.
    """
    kpool, chosen = indexer.index_kpool, indexer.index_topk // indexer.index_kpool
    wide = {name: parameter.double() for name, parameter in indexer.named_parameters()}
    x, latent = x.double(), latent.double()
    key = torch.nn.functional.layer_norm(
        x @ wide["wk.weight"].T, (DIM,), wide["k_norm.weight"], wide["k_norm.bias"], 1e-6
    )
    logits = x @ wide["index_kpool_compress_gate"].T
    pools = []
    for first in range(0, len(x) - kpool + 1, kpool):
        members = slice(first, first + kpool)
        pools.append(((logits[members] + wide["index_kpool_compress_ape"]).softmax(0) * key[members]).sum(0))
    q = (latent @ wide["wq_b.weight"].T).view(-1, HEADS, DIM)
    weights = x @ wide["weights_proj.weight"].T * HEADS**-0.5
    margins = torch.full((len(x),), float("inf"))
    for t in range(len(x)):
        if (t + 1) // kpool > chosen:
            products = torch.stack([q[t] @ pool for pool in pools[: (t + 1) // kpool]]) * DIM**-0.5
            best = (products.relu() @ weights[t]).sort(descending=True).values
            margins[t] = best[chosen - 1] - best[chosen]
    return margins


def _by_brute_force(q, pooled, weights, kpool, topk):
    """Selection of one document by sorting (score, pool) pairs in plain Python."""
    rows = []
    for t in range(len(q)):
        scored = []
        for pool in range((t + 1) // kpool):
            score = sum(float(w) * max(float(h @ pooled[pool]), 0.0) for w, h in zip(weights[t], q[t], strict=True))
            scored.append((-score, pool))
        best = sorted(pool for _, pool in sorted(scored)[: topk // kpool])
        rows.append(best + [-1] * (topk // kpool - len(best)))
    return torch.tensor(rows, dtype=torch.int32)


# ------------------------------------------------------------------------------------- against transformers
@pytest.mark.parametrize(("kpool", "topk"), [(4, 16), (16, 32), (1, 8)])
@pytest.mark.parametrize("length", [*LENGTHS, 31, 32, 33, 47, 48, 49])
def test_selection_matches_transformers(hf, hf_config, length, kpool, topk):
    indexer = _indexer(hf, hf_config, kpool, topk)
    x, latent = torch.randn(length, 48), torch.randn(length, 32)
    expected = indexer(x.unsqueeze(0), latent.unsqueeze(0), torch.ones(1, length, dtype=torch.bool), None).squeeze(0)
    ids = _select(indexer, x, latent, packed(length))
    found = selected_tokens(ids, packed(length), kpool)
    assert found.shape == (length, topk + kpool - 1)
    assert found.dtype == torch.int32
    # transformers leaves the order of ties open
    clear = _margins(indexer, x, latent) > 1e-5
    assert torch.equal(found[clear].sort(-1).values, expected[clear].sort(-1).values)
    selecting = (torch.arange(length) + 1) // kpool > topk // kpool
    assert clear[selecting].sum() >= 0.8 * selecting.sum()


def test_pools_start_at_the_first_real_token_under_left_padding(hf, hf_config):
    indexer, lengths, width = _indexer(hf, hf_config, 4, 8), [5, 30, 17, 1], 30
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths])
    x, latent = torch.randn(4, width, 48), torch.randn(4, width, 32)
    expected = indexer(x, latent, mask, None)
    (rows, cu_seqlens), (latents, _) = pack(x, mask), pack(latent, mask)
    found = selected_tokens(_select(indexer, rows, latents, cu_seqlens), cu_seqlens, 4)
    for b, where in enumerate(documents(cu_seqlens)):
        clear = _margins(indexer, rows[where], latents[where]) > 1e-5
        slots = torch.where(found[where] >= 0, found[where] - where.start + width - lengths[b], -1)
        theirs = expected[b, width - lengths[b] :]
        assert torch.equal(slots[clear].sort(-1).values, theirs[clear].sort(-1).values)


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1.0])
def test_key_norm_matches_transformers_at_small_scale(hf, hf_config, scale):
    """An eps of 1e-5, or a forgotten bias, is far off at small scale."""
    norm, key = _indexer(hf, hf_config, 4, 16).k_norm, scale * torch.randn(9, DIM)
    assert relative_error(key_norm(key, norm.weight, norm.bias), norm(key)) < 1e-6


def test_key_norm_has_eps_one_millionth_under_the_root_and_a_bias():
    # variance 1e-6: 1e-3 / sqrt(2e-6) = 0.7071068
    found = key_norm(torch.tensor([[1e-3, -1e-3]]), torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(found, torch.tensor([[10.7071068, 18.5857864]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kpool", [1, 4, 16])
def test_pooled_keys_match_transformers(hf, hf_config, kpool):
    indexer, x = _indexer(hf, hf_config, kpool, 16), torch.randn(50, 48)
    key, gate = indexer.k_norm(indexer.wk(x)), x @ indexer.index_kpool_compress_gate.T
    states = torch.cat([key, gate, torch.ones(50, 1)], dim=-1).unsqueeze(0)
    expected, _, _ = indexer.get_pooled_states(states)
    pooled, cu_pools = _pooled(indexer, x, packed(50))
    assert cu_pools.tolist() == [0, 50 // kpool]
    assert relative_error(pooled, expected[0]) < 1e-6


# ------------------------------------------------------------------------------------------------------ pooling
def test_pools_restart_at_each_document():
    key = torch.arange(1.0, 12.0).unsqueeze(1)
    zero = torch.zeros(11, 1)
    pooled, cu_pools = pool_keys(key, zero, torch.zeros(2, 1), packed(3, 0, 1, 5, 2))
    # means of (1, 2) | none | none | (5, 6) (7, 8) | (10, 11); one row behind the last pool
    assert pooled.flatten().tolist() == [1.5, 5.5, 7.5, 10.5, 0.0]
    assert cu_pools.tolist() == [0, 1, 1, 1, 3, 4]
    assert cu_pools.dtype == torch.int32


def test_each_channel_weighs_its_tokens_by_gate_and_place():
    key = torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    ln3 = 1.0986123
    # channel 0: logits (0, ln 3) from the gate: 1/4 + 15/4; channel 1: (ln 3, 0) from the place: 3/4 + 5/4
    pooled, _ = pool_keys(
        key, torch.tensor([[0.0, 0.0], [ln3, 0.0]]), torch.tensor([[0.0, ln3], [0.0, 0.0]]), packed(2)
    )
    torch.testing.assert_close(pooled, torch.tensor([[4.0, 2.0]]))


def test_pooling_in_bf16_rounds_only_the_sum():
    key, gate, ape = torch.randn(40, DIM).bfloat16(), torch.randn(40, DIM).bfloat16(), torch.randn(4, DIM).bfloat16()
    pooled, _ = pool_keys(key, gate, ape, packed(17, 23))
    wide, _ = pool_keys(key.float(), gate.float(), ape.float(), packed(17, 23))
    assert pooled.dtype == torch.bfloat16
    assert torch.equal(pooled, wide.bfloat16())


def test_shape_of_the_pools_does_not_depend_on_the_documents():
    key = torch.randn(12, DIM)
    for lengths in [(12,), (3, 3, 3, 3), (5, 7), (0, 12, 0)]:
        pooled, cu_pools = pool_keys(key, key, torch.zeros(4, DIM), packed(*lengths))
        assert pooled.shape == (3, DIM)
        assert (pooled[int(cu_pools[-1]) :] == 0).all()


# ---------------------------------------------------------------------------------------------------- selection
@pytest.mark.parametrize(("kpool", "topk"), [(1, 3), (2, 6), (4, 8), (4, 16), (16, 32)])
def test_ties_go_to_the_lower_pool(kpool, topk):
    """Small integers make every sum exact and most scores equal, many of them exactly zero or minus zero."""
    lengths = (1, 33, 0, 70, 17)
    cu_seqlens = packed(*lengths)
    tokens = sum(lengths)
    q = torch.randint(-1, 2, (tokens, HEADS, DIM)).float()
    weights = torch.randint(-1, 2, (tokens, HEADS)).float()
    counts = [length // kpool for length in lengths]
    pooled = torch.randint(-1, 2, (tokens // kpool, DIM)).float()
    cu_pools = packed(*counts)
    found = select_pools(q, pooled, weights, cu_seqlens, cu_pools, kpool, topk)
    for where, pools in zip(documents(cu_seqlens), documents(cu_pools), strict=True):
        if where.stop > where.start:
            expected = _by_brute_force(q[where], pooled[pools], weights[where], kpool, topk)
            assert torch.equal(found[where], expected)


def test_all_scores_equal_select_the_first_pools():
    found = select_pools(
        torch.zeros(40, HEADS, DIM), torch.randn(10, DIM), -torch.ones(40, HEADS), packed(40), packed(10), 4, 12
    )
    assert found[-1].tolist() == [0, 1, 2]


def test_negative_score_wins_over_no_candidate_but_loses_to_zero():
    # one head of weight -1; pools 0 and 2 score 0 (relu), pool 1 scores -1
    q = torch.ones(6, 1, 1)
    pooled = torch.tensor([[-1.0], [1.0], [-1.0]])
    found = select_pools(q, pooled, -torch.ones(6, 1), packed(6), packed(3), 2, 4)
    assert found.tolist() == [[-1, -1], [0, -1], [0, -1], [0, 1], [0, 1], [0, 2]]


def test_pool_competes_from_its_last_token_on_and_holds_the_query_itself():
    """The third pool scores highest: chosen at its last token (position 11), invisible one token earlier."""
    pooled = torch.tensor([[1.0], [2.0], [9.0]])
    found = select_pools(torch.ones(12, 1, 1), pooled, torch.ones(12, 1), packed(12), packed(3), 4, 4)
    assert found.flatten().tolist() == [-1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_selection_is_the_same_every_run():
    arguments = (
        torch.randn(90, HEADS, DIM),
        torch.randn(22, DIM),
        torch.randn(90, HEADS),
        packed(90),
        packed(22),
        4,
        16,
    )
    first = select_pools(*arguments)
    assert all(torch.equal(first, select_pools(*arguments)) for _ in range(3))


def test_queries_of_some_tokens_select_what_they_would_among_all():
    lengths = (1, 5, 37, 0, 50)
    q, weights, places = torch.randn(93, HEADS, DIM), torch.randn(93, HEADS), torch.randperm(93)[:40]
    pooled, cu_pools = pool_keys(torch.randn(93, DIM), torch.randn(93, DIM), torch.randn(4, DIM), packed(*lengths))
    whole = select_pools(q, pooled, weights, packed(*lengths), cu_pools, 4, 16)
    some = select_pools(q[places], pooled, weights[places], packed(*lengths), cu_pools, 4, 16, places)
    assert torch.equal(some, whole[places]) and (whole[places] >= 4).any()


def test_selection_has_no_gradient():
    q, key = torch.randn(9, HEADS, DIM, requires_grad=True), torch.randn(9, DIM, requires_grad=True)
    pooled, cu_pools = pool_keys(key, key, torch.zeros(4, DIM), packed(9))
    assert not pooled.requires_grad
    assert not select_pools(q, pooled, torch.randn(9, HEADS), packed(9), cu_pools, 4, 8).requires_grad


@pytest.mark.parametrize("changed", [0, 2, 3])
def test_other_documents_keep_their_selection(hf, hf_config, changed):
    indexer, cu_seqlens = _indexer(hf, hf_config, 4, 8), packed(33, 1, 40, 21)
    x, latent = torch.randn(95, 48), torch.randn(95, 32)
    where = documents(cu_seqlens)[changed]
    others = torch.ones(95, dtype=torch.bool)
    others[where] = False
    before = _select(indexer, x, latent, cu_seqlens)
    x[where], latent[where] = torch.randn_like(x[where]), torch.randn_like(latent[where])
    after = _select(indexer, x, latent, cu_seqlens)
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[where], after[where])


def test_future_tokens_change_no_selection(hf, hf_config):
    indexer, x, latent = _indexer(hf, hf_config, 4, 8), torch.randn(60, 48), torch.randn(60, 32)
    before = _select(indexer, x, latent, packed(60))
    x[42:], latent[42:] = torch.randn(18, 48), torch.randn(18, 32)
    after = _select(indexer, x, latent, packed(60))
    assert torch.equal(before[:42], after[:42])
    assert not torch.equal(before[42:], after[42:])


def test_packed_documents_select_as_each_alone(hf, hf_config):
    indexer, cu_seqlens = _indexer(hf, hf_config, 4, 8), packed(33, 1, 0, 40, 21)
    x, latent = torch.randn(95, 48), torch.randn(95, 32)
    found = _select(indexer, x, latent, cu_seqlens)
    for where in documents(cu_seqlens):
        if where.stop > where.start:
            alone = _select(indexer, x[where], latent[where], packed(where.stop - where.start))
            clear = _margins(indexer, x[where], latent[where]) > 1e-5
            assert torch.equal(found[where][clear], alone[clear])


# ------------------------------------------------------------------------------------------- expansion to tokens
@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 45), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 5, 16]),
    st.integers(1, 4),
    st.data(),
)
def test_every_query_gets_the_right_number_of_distinct_visible_tokens(lengths, kpool, chosen, data):
    cu_seqlens, tokens = packed(*lengths), sum(lengths)
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    pooled, cu_pools = pool_keys(torch.randn(tokens, 3), torch.randn(tokens, 3), torch.randn(kpool, 3), cu_seqlens)
    q, weights = torch.randn(tokens, 2, 3), torch.randn(tokens, 2)
    ids = select_pools(q, pooled, weights, cu_seqlens, cu_pools, kpool, chosen * kpool)
    found = selected_tokens(ids, cu_seqlens, kpool)
    assert found.shape == (tokens, chosen * kpool + kpool - 1)
    for t, position in enumerate(positions_in_document(cu_seqlens, tokens).tolist()):
        visible, first = position + 1, t - position
        real = [token for token in found[t].tolist() if token >= 0]
        assert found[t].tolist() == real + [-1] * (found.shape[1] - len(real))
        assert real == sorted(set(real)) and first <= real[0] and real[-1] <= t
        assert len(real) == min(visible // kpool, chosen) * kpool + visible % kpool
        assert set(range(first + visible // kpool * kpool, t + 1)) <= set(real)


@pytest.mark.parametrize("kpool", [4, 16])
def test_selection_is_dense_exactly_while_topk_and_tail_hold_every_key(kpool):
    topk, length = 2 * kpool, 4 * kpool
    pooled, cu_pools = pool_keys(torch.randn(length, 3), torch.randn(length, 3), torch.randn(kpool, 3), packed(length))
    ids = select_pools(torch.randn(length, 2, 3), pooled, torch.randn(length, 2), packed(length), cu_pools, kpool, topk)
    count = (selected_tokens(ids, packed(length), kpool) >= 0).sum(-1)
    visible = torch.arange(1, length + 1)
    dense = visible < topk + kpool
    assert torch.equal(count == visible, dense)
    assert not dense.all()


def test_tokens_of_pools_and_tail_worked_by_hand():
    # kpool 4; the second document starts at 3; its query sees 10 tokens: pools 0 and 1, tail 8 and 9
    ids = torch.full((13, 2), -1, dtype=torch.int32)
    ids[12] = torch.tensor([1, -1])
    found = selected_tokens(ids, packed(3, 10), 4)
    assert found[12].tolist() == [7, 8, 9, 10, 11, 12, -1, -1, -1, -1, -1]
    assert found[2].tolist() == [0, 1, 2] + [-1] * 8


def test_unused_row_of_a_batch_selects_nothing():
    found = selected_positions(torch.full((2, 1), -1, dtype=torch.int32), torch.tensor([0, 2]), 4)
    assert found.tolist() == [[-1] * 7, [0, 1, -1, -1, -1, -1, -1]]


# -------------------------------------------------------------------------------------------------------- steps
@pytest.mark.parametrize("kpool", [1, 4])
def test_steps_equal_the_packed_form(kpool):
    """Two sequences grow token by token over a cache of pooled keys whose rows are shuffled; one starts late."""
    topk, length, late = 2 * kpool, 23, 5
    key, gate, ape = torch.randn(2, length, DIM), torch.randn(2, length, DIM), torch.randn(kpool, DIM)
    q, weights = torch.randn(2, length, HEADS, DIM), torch.randn(2, length, HEADS)
    pools = length // kpool
    pool_table = torch.randperm(2 * pools).view(2, pools).to(torch.int32)
    cache = torch.full((2 * pools, DIM), 1e4)
    tails = torch.full((2, kpool - 1, DIM), 1e4), torch.full((2, kpool - 1, DIM), 1e4)
    found = torch.full((2, length, topk // kpool), -1, dtype=torch.int32)
    for step in range(length + late):
        seq_lens = torch.tensor([min(step + 1, length), max(step + 1 - late, 0)], dtype=torch.int32)
        if step >= length:
            seq_lens[0] = 0  # the first sequence has ended: an unused row
        place = (seq_lens - 1).clamp(min=0).long()
        at = torch.arange(2), place
        pooled, finished, *tails = pool_keys_step(key[at], gate[at], *tails, ape, seq_lens)
        for b in finished.nonzero().flatten().tolist():
            cache[pool_table[b, int(seq_lens[b]) // kpool - 1]] = pooled[b]
        ids = select_pools_step(q[at], cache, weights[at], pool_table, seq_lens, kpool, topk)
        for b in range(2):
            if seq_lens[b]:
                found[b, place[b]] = ids[b]
            else:
                assert (ids[b] == -1).all()
    cu_seqlens = packed(length, length)
    expected_pools, cu_pools = pool_keys(key.flatten(0, 1), gate.flatten(0, 1), ape, cu_seqlens)
    expected = select_pools(q.flatten(0, 1), expected_pools, weights.flatten(0, 1), cu_seqlens, cu_pools, kpool, topk)
    assert relative_error(cache[pool_table.flatten().long()], expected_pools[: 2 * pools]) < 1e-6
    assert torch.equal(found.flatten(0, 1), expected)


def test_steps_break_ties_as_the_packed_form():
    q, weights = torch.randint(-1, 2, (30, HEADS, DIM)).float(), torch.randint(-1, 2, (30, HEADS)).float()
    pooled = torch.randint(-1, 2, (7, DIM)).float()
    expected = select_pools(q, pooled, weights, packed(30), packed(7), 4, 12)
    table, seq_lens = torch.arange(7, dtype=torch.int32).expand(30, 7), torch.arange(1, 31, dtype=torch.int32)
    assert torch.equal(select_pools_step(q, pooled, weights, table, seq_lens, 4, 12), expected)


# --------------------------------------------------------------------------------------------------------- edges
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(topk=10), "topk is 10, kpool 4; needed: topk a positive multiple of kpool"),
        (dict(pooled=torch.zeros(2, 5)), r"pooled has shape \[2, 5\]; needed: \[P, D\] = \[any, 16\]"),
        (dict(weights=torch.zeros(9, 3)), r"weights has shape \[9, 3\]; needed: \[T, Hi\] = \[9, 4\]"),
        (dict(places=torch.arange(8)), r"places has shape \[8\]; needed: \[t\] = \[9\]"),
        (dict(places=torch.arange(9, dtype=torch.int32)), "places is torch.int32; needed: torch.int64"),
        (dict(cu_pools=packed(1, 1)), r"cu_pools has shape \[3\]; needed: \[N \+ 1\] = \[2\]"),
    ],
)
def test_wrong_arguments_of_a_selection_are_refused(changes, message):
    arguments = dict(
        q=torch.zeros(9, HEADS, DIM),
        pooled=torch.zeros(2, DIM),
        weights=torch.zeros(9, HEADS),
        cu_seqlens=packed(9),
        cu_pools=packed(2),
        kpool=4,
        topk=8,
    )
    with pytest.raises(ShapeError, match="select_pools: " + message):
        select_pools(**(arguments | changes))


def test_wrong_width_of_the_place_embedding_is_refused():
    with pytest.raises(ShapeError, match=r"pool_keys: ape has shape \[4, 5\]; needed: \[kpool, D\] = \[any, 16\]"):
        pool_keys(torch.zeros(9, DIM), torch.zeros(9, DIM), torch.zeros(4, 5), packed(9))
