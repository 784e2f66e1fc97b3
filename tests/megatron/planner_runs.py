"""Parameters of modules built on the meta device, rank by rank of a layout of any size."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from .process_pool import Layout


def counted_by_rank(layout: Layout, architecture: Any, planned: Any) -> dict[int, dict[str, int]]:
    """Parameters of ranks of ``planned`` (a ParallelLayout), counted from the modules; no expert is allocated.

    The processes of ``layout`` play the ranks in turn, on torch's process group that communicates nothing.
    """
    from glm5next_plugin.adapters.megatron import Glm5NextProvider  # isort: skip
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counts = {}
    for rank in range(torch.distributed.get_rank(), planned.gpus, layout.world):
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=planned.gpus)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            planned.tensor,
            planned.pipeline,
            context_parallel_size=planned.context,
            expert_model_parallel_size=planned.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0)
        stages = planned.layers_per_stage
        uneven = len(set(stages)) > 1
        provider = Glm5NextProvider.from_architecture(
            architecture,
            tensor_model_parallel_size=planned.tensor,
            pipeline_model_parallel_size=planned.pipeline,
            expert_model_parallel_size=planned.expert,
            context_parallel_size=planned.context,
            sequence_parallel=planned.tensor > 1,
            num_layers_in_first_pipeline_stage=stages[0] if uneven else None,
            num_layers_in_last_pipeline_stage=stages[-1] if uneven else None,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        provider.finalize()
        # where stock and own modules put their parameters on a GPU machine
        with torch.device("meta"), mock.patch.object(torch.cuda, "current_device", lambda: torch.device("meta")):
            (model,) = provider.provide_distributed_model(wrap_with_ddp=False, init_model_with_meta_device=True)
        count = {"stage": parallel_state.get_pipeline_model_parallel_rank(), "experts": 0, "frozen": 0, "dense": 0}
        count["fp32"] = 0
        for name, parameter in model.named_parameters():
            # the stock router creates its weight without naming a device, which Megatron-Bridge takes for the CPU
            assert parameter.is_meta or name.endswith("mlp.router.weight"), name
            kind = "experts" if ".experts." in name and "shared" not in name else "dense"
            count[kind if parameter.requires_grad else "frozen"] += parameter.numel()
            count["fp32"] += parameter.numel() * (parameter.dtype == torch.float32)
        counts[rank] = count
    return counts
