"""Process groups and seeds for a script that is not run by a training framework."""

from __future__ import annotations

import atexit
import os

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from glm5next_plugin.errors import InputError


def initialize(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    context_parallel: int = 1,
    *,
    virtual_pipeline_parallel: int | None = None,
    seed: int = 0,
) -> None:
    """Start torch.distributed, where it is not running, and megatron-core's groups.

    Under torchrun the environment gives rank and world size; a plain ``python`` process is a world of one. NCCL on
    GPUs, gloo without.

    Raises:
        InputError: the parallel sizes do not divide the world.
    """
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            torch.distributed.init_process_group(backend)
        else:
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        if backend == "gloo":
            atexit.register(_end_gloo)
    world = torch.distributed.get_world_size()
    dense = tensor_parallel * context_parallel * pipeline_parallel
    if world % dense or world % (expert_parallel * pipeline_parallel):
        raise InputError(
            f"{world} processes; needed: a multiple of tensor_parallel x context_parallel x pipeline_parallel "
            f"({tensor_parallel} x {context_parallel} x {pipeline_parallel}) and of expert_parallel x "
            f"pipeline_parallel ({expert_parallel} x {pipeline_parallel})"
        )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_pipeline_parallel,
        context_parallel_size=context_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(seed)


def _end_gloo() -> None:
    """Stop gloo's threads: one that outlives the interpreter can end a process that has done its work with SIGABRT."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
