"""Routing and indexer replay in every layout: each layer gets its own rows, and they decide."""

import re

import pytest
import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.replay import ReplayRecord, kind_layers

from .agreement import assembled
from .packed_batch import PackedBatch
from .process_pool import Layout
from .test_hf_parity import tokens
from .test_pipelines import RECOMPUTE, VIRTUAL

REPLAY = "tests.megatron.replay_runs:run"
ERROR = "tests.megatron.replay_runs:error_of_replay"
LENGTHS = [(37, 50, 1, 3), (25, 8, 41)]
DOCUMENTS = [[tokens(length, seed=40 + seed)[0] for length in lengths] for seed, lengths in enumerate(LENGTHS)]
LAYOUTS = {
    "one process": Layout(),
    "recomputed": Layout(provider=RECOMPUTE),
    "pp4": Layout(pp=4, world=4),
    "pp2, two virtual stages, recomputed": Layout(pp=2, world=2, provider=VIRTUAL + RECOMPUTE),
    "tp2": Layout(tp=2, world=2),
    "ep2": Layout(ep=2, world=2),
    "cp2": Layout(cp=2, world=2),
    "cp2 tp2, recomputed": Layout(cp=2, tp=2, world=4, provider=RECOMPUTE),
}


def batches(layout: Layout) -> list[PackedBatch]:
    return [PackedBatch(documents, "verl", 2 * layout.cp * layout.tp) for documents in DOCUMENTS]


def encoded(kind: str, document: torch.Tensor, architecture: Architecture) -> ReplayRecord:
    """Choices that tell layer and token: experts ``7 * token + 3 * layer + 0..3``, the pools farthest back by layer."""
    rows = []
    for token in range(len(document)):
        row = []
        for layer in kind_layers(kind, architecture):
            if kind == "routing":
                row.append([(7 * token + 3 * layer + i) % 16 for i in range(4)])
            else:
                finished = (token + 1) // architecture.index_kpool
                row.append([(layer + i) % finished for i in range(min(4, finished))] + [-1] * (4 - min(4, finished)))
        rows.append(row)
    return ReplayRecord.of(kind, document, torch.tensor(rows), architecture)


@pytest.fixture(scope="module")
def architecture(checkpoints):
    return Architecture.from_pretrained(checkpoints(4))


@pytest.fixture(scope="module")
def records(architecture):
    return {
        index: {kind: [encoded(kind, d, architecture) for d in documents] for kind in ("routing", "indexer")}
        for index, documents in enumerate(DOCUMENTS)
    }


@pytest.fixture(scope="module")
def native(pool, checkpoints):
    """One process without replay, its choices recorded."""
    (answer,) = pool.run(REPLAY, Layout(), checkpoint=str(checkpoints(4)), batches=batches(Layout()), record=True)
    return answer


def require_same_choices(found, expected):
    """Of every micro-batch in ``found``; the order of experts says nothing."""
    assert found
    for index, given in found.items():
        for kind, mine in given.items():
            for a, b in zip(mine, expected[index][kind], strict=True):
                assert a.layers == b.layers and a.choices.dtype == b.choices.dtype
                assert torch.equal(a.choices.sort(-1).values, b.choices.sort(-1).values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layer_and_token_gets_its_own_rows(pool, checkpoints, native, records, architecture, name):
    layout = LAYOUTS[name]
    packed = batches(layout)
    answers = pool.run(REPLAY, layout, checkpoint=str(checkpoints(4)), batches=packed, records=records, record=True)
    seen = set()
    for answer in answers:
        for kind, layer, index, places, ids in answer["reached"]:
            column = kind_layers(kind, architecture).index(layer)
            for place, found in zip(places, ids, strict=True):
                for document, start in enumerate(packed[index].starts()):
                    record = records[index][kind][document]
                    token = place - start
                    if 0 <= token < len(record.token_ids):
                        expected = sorted(i for i in record.choices[token, column].tolist() if i >= 0)
                        assert found == expected, (kind, layer, index, place)
                        seen.add((kind, layer, index, document, token))
    # nothing was left out: every layer that chooses, and every token
    assert len(seen) == (5 + 2) * sum(sum(lengths) for lengths in LENGTHS)
    # other choices, other logits; the gate learns from the replayed ones
    changed, own = assembled(answers), assembled([native])
    for index in own:
        real = packed[index].real_places()
        mine = own[index][:, batches(Layout())[index].real_places()]
        assert (changed[index][:, real] - mine).abs().max() > 0.01
    for layer in architecture.moe_layers:
        gradient = answers[0]["gate_gradients"][f"model.language_model.layers.{layer}.mlp.gate.weight"]
        assert gradient.isfinite().all() and gradient.norm() > 0
    # and what was recorded is what was replayed
    for answer in answers:
        require_same_choices(answer["records"], records)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_recorded_replays_to_the_same_bits(pool, checkpoints, native, name):
    layout = LAYOUTS[name]
    answers = pool.run(REPLAY, layout, checkpoint=str(checkpoints(4)), batches=batches(layout), record=True)
    records = {index: given for answer in answers for index, given in answer["records"].items()}
    replayed = pool.run(REPLAY, layout, checkpoint=str(checkpoints(4)), batches=batches(layout), records=records)
    found, expected = assembled(replayed), assembled(answers)
    assert all(torch.equal(found[index], expected[index]) for index in expected) and len(found) == 2
    # every rank has whole records, and the layouts choose alike
    for answer in answers:
        require_same_choices(answer["records"], native["records"])


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, world=2)], ids=str)
def test_the_stock_router_replay_takes_the_same_records(pool, checkpoints, records, layout):
    packed = [batches(layout)[0]]
    given = {0: {"routing": records[0]["routing"]}}
    ours = pool.run(REPLAY, layout, checkpoint=str(checkpoints(4)), batches=packed, records=given)
    stock = Layout(**{**vars(layout), "provider": (("moe_enable_routing_replay", True),)})
    theirs = pool.run(REPLAY, stock, checkpoint=str(checkpoints(4)), batches=packed, records=given, stock=True)
    real = {0: packed[0].real_places()}
    a, b = assembled(ours)[0][:, real[0]], assembled(theirs)[0][:, real[0]]
    assert torch.equal(a, b)


def test_records_that_do_not_fit_are_refused_with_the_numbers(pool, checkpoints, records, architecture):
    batch = PackedBatch(DOCUMENTS[0], "verl", 4)
    shifted = [records[0]["routing"][1], *records[0]["routing"][1:]]
    half = ReplayRecord.of(
        "routing", DOCUMENTS[0][0], records[0]["routing"][0].choices[:, :2].long(), architecture, layers=(3, 4)
    )
    for given, message in (
        ({"routing": shifted}, "routing record 0 has 50 tokens; its document has 40 with padding"),
        (
            {"routing": records[1]["routing"][:1]},
            r"record and sequence differ at \d+ of 25 tokens, first at token 0: recorded",
        ),
        ({"routing": [half]}, r"routing records lack layers \[5, 6, 7\]"),
        ({"indexer": records[0]["routing"]}, "a record of routing was given as indexer"),
    ):
        (found,) = pool.run(ERROR, Layout(), checkpoint=str(checkpoints(4)), batch=batch, records=given)
        assert re.search(message, found), found


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (36, "routing record 0 leaves 1 tokens to the model, first token 36; needed: a choice for each"),
        (37, "the routers have no RouterReplay; needed: moe_enable_routing_replay=True"),
    ],
)
def test_the_stock_router_replay_needs_every_choice(pool, checkpoints, records, architecture, rows, message):
    choices = records[0]["routing"][0].choices[:rows].long()
    given = {"routing": [ReplayRecord.of("routing", DOCUMENTS[0][0], choices, architecture)]}
    batch = PackedBatch(DOCUMENTS[0], "verl", 4)
    (found,) = pool.run(ERROR, Layout(), checkpoint=str(checkpoints(4)), batch=batch, records=given, stock=True)
    assert message in found, found
