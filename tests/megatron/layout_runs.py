"""What the processes of a layout run: build, load, one forward and backward, and the answers in released names."""

from __future__ import annotations

from typing import Any

import torch

from .process_pool import Layout


def build(layout: Layout, checkpoint: str, *, dtype: str = "float32", ddp: bool = True) -> tuple[Any, Any, list]:
    """(bridge, provider, model chunks) of this rank with the checkpoint's weights."""
    from glm5next_plugin.adapters import megatron as adapter

    adapter.initialize(
        layout.tp,
        layout.pp,
        layout.ep,
        virtual_pipeline_parallel=dict(layout.provider).get("virtual_pipeline_model_parallel_size"),
    )
    bridge = adapter.AutoBridge.from_hf_pretrained(checkpoint)
    provider = bridge.to_megatron_provider()
    settings = dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.tp > 1,
        parallel_output=False,
        **dict(layout.provider),
    )
    provider.apply_overrides_and_finalize(dtype=getattr(torch, dtype), overrides=settings)
    from megatron.core.distributed import DistributedDataParallelConfig

    models = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True) if ddp else None, wrap_with_ddp=ddp
    )
    return bridge, provider, models


def packed_parameters(lengths: list[int] | None):
    """PackedSeqParams of documents with these lengths, or None."""
    if lengths is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def direction(shape: torch.Size, seed: int) -> torch.Tensor:
    """A fixed random direction: the loss is the mean product of the logits with it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward_backward(
    layout: Layout,
    checkpoint: str,
    batches: list[torch.Tensor],
    lengths: list[int] | None = None,
    backward: bool = True,
    margins: bool = False,
) -> dict[str, Any]:
    """Logits of every micro-batch and gradients by released name.

    Args:
        batches: token ids ``[b, s]`` a micro-batch; data parallel ranks take turns.
        lengths: documents of a packed row (``b`` is 1 then).
        margins: also the smallest gap between a chosen and a rejected score of router and indexer.

    Returns:
        ``logits`` (last stage; micro-batch -> ``[b, s, vocab]``), ``grad_norm``, ``gradients`` (rank 0) and
        ``margins``.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from .selection_margins import recording

    bridge, provider, models = build(layout, checkpoint)
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(range(data_rank, len(batches), data_size))
    logits: dict[int, torch.Tensor] = {}

    def step(indices, model):
        index = next(indices)
        tokens = batches[index]
        output = model(
            input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed_parameters(lengths)
        )

        def loss(output):
            logits[index] = output.detach().clone()
            value = (output * direction(output.shape, index)).mean()
            return value, {}

        return output, loss

    with recording(enabled=margins) as smallest:
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(mine) for _ in models] if len(models) > 1 else iter(mine),
            model=models,
            num_microbatches=len(mine),
            seq_length=batches[0].shape[1],
            micro_batch_size=batches[0].shape[0],
            forward_only=not backward,
        )
    answer: dict[str, Any] = {"logits": logits, "margins": dict(smallest)}
    if backward:
        finalize_model_grads(models)
        answer["grad_norm"] = grad_norm(models)
        answer["gradients"] = gradients_by_released_name(bridge, models)
    return answer


def grad_norm(models) -> float:
    """The norm that megatron-core's optimizer clips by, over all ranks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), models)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def gradients_by_released_name(bridge, models) -> dict[str, torch.Tensor]:
    """Export ``main_grad`` through the bridge as if it were the weights; empty on ranks other than 0.

    The frozen tensors (indexer, expert bias) have no gradient and are left out by name.
    """
    from megatron.core.utils import unwrap_model

    for model in unwrap_model(models):
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad != (".indexer." in name), (
                f"{name} must be frozen just if it is the indexer's"
            )
            if parameter.requires_grad:
                parameter.data = parameter.main_grad.clone()
    exported = {
        name: tensor.clone()
        for name, tensor in bridge.export_hf_weights(models, cpu=True, show_progress=False)
        if ".indexer." not in name and "e_score_correction_bias" not in name
    }
    return exported if torch.distributed.get_rank() == 0 else {}
