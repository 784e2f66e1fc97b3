"""What the processes of a layout run in training tests: optimizer steps, and the weights they lead to."""

from __future__ import annotations

from typing import Any

import torch

from .layout_runs import build, run_pipeline
from .process_pool import Layout


def train(
    layout: Layout,
    checkpoint: str,
    batches: list,
    steps: int,
    lr: float,
    dtype: str = "float32",
    **optimizer: Any,
) -> dict[str, Any]:
    """Adam steps over the same micro-batches.

    Returns:
        ``norms`` of the gradients, ``weights`` by released name (rank 0; of the model, so in ``dtype``), and where the
        optimizer keeps its state: ``masters`` (dtypes of the main parameters) and ``state_devices``.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bridge, _, models = build(layout, checkpoint, dtype=dtype)
    for model in models:
        model.config.finalize_model_grads_func = finalize_model_grads
        if model.ddp_config.overlap_grad_reduce:
            model.config.no_sync_func = model.no_sync
            model.config.grad_sync_func = model.start_grad_sync
        if model.ddp_config.overlap_param_gather:
            model.config.param_sync_func = model.start_param_sync
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=dtype == "bfloat16",
        params_dtype=getattr(torch, dtype),
        use_distributed_optimizer=models[0].ddp_config.use_distributed_optimizer,
        overlap_param_gather=models[0].ddp_config.overlap_param_gather,
        **optimizer,
    )
    made = get_megatron_optimizer(config, models)
    norms = []
    for _ in range(steps):
        for model in models:
            model.zero_grad_buffer()
        made.zero_grad()
        run_pipeline(models, batches)
        stepped, norm, _ = made.step()
        assert stepped
        norms.append(float(norm))
    if models[0].ddp_config.overlap_param_gather:
        for model in models:
            model.disable_forward_pre_hook(param_sync=True)
    weights = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(models, cpu=True, show_progress=False)}
    groups = [group for inner in made.chained_optimizers for group in inner.optimizer.param_groups]
    states = [state for inner in made.chained_optimizers for state in inner.optimizer.state.values()]
    return {
        "norms": norms,
        "masters": sorted({str(parameter.dtype) for group in groups for parameter in group["params"]}),
        "state_devices": sorted({state["exp_avg"].device.type for state in states}),
        "weights": weights if torch.distributed.get_rank() == 0 else {},
    }
