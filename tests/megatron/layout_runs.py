"""What the processes of a layout run: build, load, one forward and backward, and the answers in released names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .packed_batch import PackedBatch
from .process_pool import Layout


def build(layout: Layout, checkpoint: str, *, dtype: str = "float32", ddp: bool = True) -> tuple[Any, Any, list]:
    """(bridge, provider, model chunks) of this rank with the checkpoint's weights."""
    from glm5next_plugin.adapters import megatron as adapter

    adapter.initialize(
        layout.tp,
        layout.pp,
        layout.ep,
        layout.cp,
        virtual_pipeline_parallel=dict(layout.provider).get("virtual_pipeline_model_parallel_size"),
    )
    bridge = adapter.AutoBridge.from_hf_pretrained(checkpoint)
    provider = bridge.to_megatron_provider()
    settings = dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.tp > 1,
        parallel_output=False,
        **dict(layout.provider),
    )
    provider.apply_overrides_and_finalize(dtype=getattr(torch, dtype), overrides=settings)
    from megatron.core.distributed import DistributedDataParallelConfig

    models = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **dict(layout.ddp)) if ddp else None,
        wrap_with_ddp=ddp,
    )
    return bridge, provider, models


def direction(shape: Sequence[int], seed: int) -> torch.Tensor:
    """A fixed random direction: the loss is the mean product of the logits with it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward_backward(
    layout: Layout,
    checkpoint: str,
    batches: list[torch.Tensor | PackedBatch],
    backward: bool = True,
    margins: bool = False,
) -> dict[str, Any]:
    """Logits of every micro-batch and gradients by released name.

    Args:
        batches: token ids ``[b, s]``, or packed documents, a micro-batch; data parallel ranks take turns. The loss is
            the mean of all real tokens' products with :func:`direction`.
        margins: also the smallest gap between a chosen and a rejected score of router and indexer.

    Returns:
        ``logits`` (last stage; micro-batch -> ``[b, s / cp, vocab]``), ``places`` (where those ``s / cp`` stand in the
        whole row), ``grad_norm``, ``gradients`` (rank 0) and
        ``margins``.
    """
    from megatron.core.distributed import finalize_model_grads

    from .selection_margins import recording

    bridge, _, models = build(layout, checkpoint)
    with recording(enabled=margins) as smallest:
        logits, places = run_pipeline(models, batches, backward)
    answer: dict[str, Any] = {"logits": logits, "places": places, "margins": dict(smallest)}
    if backward:
        finalize_model_grads(models)
        answer["grad_norm"] = grad_norm(models)
        answer["gradients"] = gradients_by_released_name(bridge, models)
    return answer


def run_pipeline(
    models,
    batches: list[torch.Tensor | PackedBatch],
    backward: bool = True,
    prepare: Callable[[int, Any, torch.Tensor], None] | None = None,
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """One forward (and backward) over this data parallel rank's micro-batches: logits and where they stand.

    ``prepare(index, packed_seq_params, input_ids)`` is called before the first forward pass of a micro-batch; all
    chunks of the model get the same parameters.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(range(data_rank, len(batches), data_size))
    logits: dict[int, torch.Tensor] = {}
    places: dict[int, torch.Tensor] = {}
    parameters: dict[int, Any] = {}
    cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()

    def step(indices, model):
        index = next(indices)
        batch = batches[index]
        row = batch.row().unsqueeze(0) if isinstance(batch, PackedBatch) else batch
        whole = batch if isinstance(batch, PackedBatch) else PackedBatch([row[0]])
        places[index] = whole.places(cp_rank, cp_size)
        input_ids = row[:, places[index]].to(torch.cuda.current_device())
        if index not in parameters:
            parameters[index] = whole.parameters() if whole is batch else None
            if prepare is not None:
                prepare(index, parameters[index], input_ids)
        output = model(
            input_ids=input_ids,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=parameters[index],
        )

        def loss(output):
            logits[index] = output.detach().float().cpu()
            weight = torch.zeros(*row.shape, output.shape[-1])
            real = whole.real_places()
            weight[:, real] = direction((row.shape[0], len(real), output.shape[-1]), index)
            product = output.float() * weight[:, places[index]].to(output.device)
            return product.sum() / weight[:, real].numel(), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(mine) for _ in models] if len(models) > 1 else iter(mine),
        model=models,
        num_microbatches=len(mine),
        seq_length=1,  # variable_seq_lengths: stages tell each other the shapes
        micro_batch_size=1,
        forward_only=not backward,
    )
    return logits, places


def error_of_forward(
    layout: Layout, checkpoint: str, batch: torch.Tensor, packed: PackedBatch, qkv_format: str = "thd"
) -> str:
    """What a forward pass over ``batch`` ``[b, s]`` is refused with."""
    from glm5next_plugin.errors import InputError

    _, _, models = build(layout, checkpoint, ddp=False)
    parameters = packed.parameters()
    parameters.qkv_format = qkv_format
    try:
        models[0](input_ids=batch, position_ids=None, attention_mask=None, packed_seq_params=parameters)
    except InputError as error:
        return str(error)
    return ""


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
