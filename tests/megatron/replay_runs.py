"""What the processes of a layout run in replay tests: record, replay, and what reached routers and attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from .layout_runs import build, gradients_by_released_name, run_pipeline
from .packed_batch import PackedBatch
from .process_pool import Layout


def run(
    layout: Layout,
    checkpoint: str,
    batches: list[PackedBatch],
    records: dict[int, dict[str, list]] | None = None,
    record: bool = False,
    stock: bool = False,
) -> dict[str, Any]:
    """One forward and backward over all micro-batches, with replay.

    Args:
        records: micro-batch -> ``routing`` and ``indexer`` records of its documents.
        record: return what was chosen in this rank's micro-batches, under ``records``.
        stock: replay routing through megatron-core's RouterReplay instead.

    Returns:
        ``logits`` and ``places`` as in :func:`.layout_runs.forward_backward`; ``gate_gradients``; ``reached``: what
        routers and sparse attention worked with, a list of (kind, 0-based layer, micro-batch, packed places, ids).
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from glm5next_plugin.adapters.megatron.replay import attach_replay, recorded, set_router_replay

    RouterReplay.clear_global_router_replay_instances()
    bridge, provider, models = build(layout, checkpoint)
    architecture, attached = provider.architecture, {}
    reached: list[tuple] = []

    def attach(index: int, parameters, input_ids: torch.Tensor) -> None:
        given = records[index] if records else {}
        if stock:
            set_router_replay(models, parameters, input_ids, given["routing"])
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            given = {}
        attach_replay(parameters, input_ids, architecture, **given, record=record)
        attached[index] = (parameters, input_ids)

    with watching(reached, attached, batches):
        logits, places = run_pipeline(models, batches, prepare=attach)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    answer: dict[str, Any] = {"logits": logits, "places": places, "reached": reached}
    if record:
        answer["records"] = {
            index: {
                kind: recorded(*given, [len(d) for d in batches[index].documents], kind, architecture)
                for kind in ("routing", "indexer")
            }
            for index, given in sorted(attached.items())
        }
    finalize_model_grads(models)
    gradients = gradients_by_released_name(bridge, models)
    answer["gate_gradients"] = {name: value for name, value in gradients.items() if name.endswith("mlp.gate.weight")}
    return answer


@contextlib.contextmanager
def watching(reached: list, attached: dict, batches: list[PackedBatch]) -> Iterator[None]:
    """Note what routers and sparse attention work with; where the tokens stand is worked out here by hand."""
    from megatron.core import parallel_state

    from glm5next_plugin.adapters.megatron import dsa, layer, router

    current: dict[str, int] = {}
    forward = layer.HyperConnectedLayer.forward
    routing, sparse_mla = router.SigmoidRouter.routing, dsa.sparse_mla

    def places(shard: bool) -> torch.Tensor:
        cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        mine = batches[current["index"]].places(cp_rank, cp_size)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        return mine.chunk(parallel_state.get_tensor_model_parallel_world_size())[tp_rank] if shard else mine

    def watched_forward(self, hidden_states, *args, packed_seq_params=None, **kwargs):
        (current["index"],) = [i for i, (parameters, _) in attached.items() if parameters is packed_seq_params]
        current["layer"] = self.layer_number - 1
        return forward(self, hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)

    def watched_routing(self, *args, **kwargs):
        probabilities, chosen = routing(self, *args, **kwargs)
        ids = [row.nonzero().flatten().tolist() for row in chosen]
        reached.append(("routing", current["layer"], current["index"], places(shard=True).tolist(), ids))
        return probabilities, chosen

    def watched_sparse_mla(query, latent, kv_b, pool_ids, *args, **kwargs):
        ids = [[pool for pool in row if pool >= 0] for row in pool_ids.tolist()]
        reached.append(("indexer", current["layer"], current["index"], places(shard=False).tolist(), ids))
        return sparse_mla(query, latent, kv_b, pool_ids, *args, **kwargs)

    with (
        mock.patch.object(layer.HyperConnectedLayer, "forward", watched_forward),
        mock.patch.object(router.SigmoidRouter, "routing", watched_routing),
        mock.patch.object(dsa, "sparse_mla", watched_sparse_mla),
    ):
        yield


def error_of_replay(
    layout: Layout, checkpoint: str, batch: PackedBatch, records: dict[str, list], stock: bool = False
) -> str:
    """What records are refused with when they are attached, or given to megatron-core's RouterReplay."""
    from glm5next_plugin.adapters.megatron.replay import attach_replay, set_router_replay
    from glm5next_plugin.errors import InputError

    _, provider, models = build(layout, checkpoint, ddp=False)
    try:
        if stock:
            set_router_replay(models, batch.parameters(), batch.row()[None], records["routing"])
        attach_replay(batch.parameters(), batch.row()[None], provider.architecture, **records)
    except InputError as error:
        return str(error)
    return ""
