"""The trainer of ``glm5next bringup``: a rank of stock Megatron with this model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.bringup.grpo import clipped_policy_loss
from glm5next_plugin.bringup.trainer import Minibatch, TrainerSettings, UpdateFigures
from glm5next_plugin.bringup.weights import digest
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.errors import InputError
from glm5next_plugin.ops.log_probs import token_log_probs

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MICRO_BATCH_TOKENS = 4096
_ADAM = dict(adam_beta1=0.9, adam_beta2=0.98, weight_decay=0.0, clip_grad=1.0)


class MegatronTrainer:
    """Implements :class:`glm5next_plugin.bringup.trainer.Trainer` over gloo, with mcore's schedule, DDP and Adam.

    Args:
        settings: checkpoint, precision, parallel sizes, learning rate.
        rank: of this process among ``settings.world``.
        store: file through which the ranks find each other.

    Raises:
        InputError: a checkpoint or a setting that the adapter refuses.
    """

    def __init__(self, settings: TrainerSettings, rank: int, store: str):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, settings.world), rank=rank, world_size=settings.world
        )
        from glm5next_plugin.adapters import megatron as adapter

        tp, pp, ep = settings.tensor_parallel, settings.pipeline_parallel, settings.expert_parallel
        self._reader = CheckpointReader(settings.checkpoint)
        self._architecture = self._reader.architecture
        if self._architecture.num_hidden_layers % pp:
            raise InputError(f"pp {pp}; needed: a divisor of the {self._architecture.num_hidden_layers} layers")
        adapter.initialize(tp, pp, ep)
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self._bridge = adapter.AutoBridge.from_hf_pretrained(str(settings.checkpoint))
        dtype = _TORCH_DTYPES[settings.dtype]
        provider = self._bridge.to_megatron_provider()
        overrides = dict(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            sequence_parallel=tp > 1,
            parallel_output=False,
        )
        try:
            provider.apply_overrides_and_finalize(dtype=dtype, overrides=overrides)
        except ValueError as error:  # megatron-core's own check of the parallel sizes comes before ours
            raise InputError(f"tp {tp}, pp {pp}, ep {ep}: {error}") from error
        self._models = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrap_with_ddp=True
        )
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=False,
                **_ADAM,
            ),
            self._models,
        )
        from megatron.core import parallel_state

        self._groups = parallel_state
        self._pipeline_stages = pp

    # ------------------------------------------------------------------ weights
    def weights(self) -> dict[str, str] | None:
        """Released name to digest, on rank 0."""
        return self._on_first_rank({name: digest(tensor) for name, tensor in self._released()})

    def export(self, directory: Path) -> dict[str, str] | None:
        """Write the checkpoint; vision and MTP tensors come from the one that the run started from."""
        from .export import carried_tensors, write_released

        digests = {}

        def digested() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._released():
                digests[name] = digest(tensor)
                yield name, tensor

        write_released(
            digested(),
            directory,
            self._architecture,
            carried=carried_tensors(self._reader),
            companions=self._reader.path,
            dtype="keep",
        )
        return self._on_first_rank(digests)

    def _released(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._bridge.export_hf_weights(self._models, cpu=True, show_progress=False)

    # ------------------------------------------------------------------ training
    def log_probs(self, tokens: torch.Tensor, answer_length: int) -> torch.Tensor | None:
        """Log-probabilities of the answers, on the last stage's first rank."""
        found: dict[int, torch.Tensor] = {}
        mine = self._share(tokens)

        def keep(index: slice, log_probs: torch.Tensor):
            found[index.start] = log_probs.detach()
            return log_probs.new_zeros(()), {}

        self._run(mine, answer_length, keep, forward_only=True)
        if not found:
            return None
        local = torch.cat([found[start] for start in sorted(found)])
        parts = [torch.empty_like(local) for _ in range(self._data_size)]
        torch.distributed.all_gather(parts, local, group=self._groups.get_data_parallel_group())
        return self._on_first_rank(torch.cat(parts), last_stage=True)

    def update(self, minibatch: Minibatch) -> UpdateFigures | None:
        """One Adam step; figures on the last stage's first rank."""
        from megatron.core.distributed import finalize_model_grads

        tokens = int(minibatch.mask.sum())
        old, advantages, mask = (self._share(x) for x in (minibatch.old, minibatch.advantages, minibatch.mask))
        kl = torch.zeros(())

        def loss(index: slice, log_probs: torch.Tensor):
            value, change = clipped_policy_loss(log_probs, old[index], advantages[index], mask[index])
            kl.add_(change)
            # the schedule divides by the micro-batches and DDP by the data parallel ranks
            return value / tokens * micro_batches * self._data_size, {}

        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        mine = self._share(minibatch.tokens)
        micro_batches = self._micro_batches(*mine.shape)
        self._run(mine, minibatch.old.shape[1], loss, forward_only=False)
        finalize_model_grads(self._models)
        _, grad_norm, _ = self._optimizer.step()
        torch.distributed.all_reduce(kl, group=self._groups.get_data_parallel_group())
        return self._on_first_rank(UpdateFigures(float(grad_norm), kl.item() / tokens), last_stage=True)

    def probe(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Intermediate results of this rank's layers."""
        from .bringup_probe import recording

        with recording(self._models, self._architecture, *tokens.shape) as recorded:
            self._forward_backward(tokens, 1, lambda logits, index: (logits.new_zeros(()), {}), forward_only=True)
        first = self._groups.get_tensor_model_parallel_rank() == self._groups.get_data_parallel_rank() == 0
        return recorded if first else {}

    def _run(
        self,
        tokens: torch.Tensor,
        answer_length: int,
        loss: Callable[[slice, torch.Tensor], tuple[torch.Tensor, dict]],
        *,
        forward_only: bool,
    ) -> None:
        """Call ``loss(samples, log_probs)`` for every micro-batch of this rank's ``tokens``, on the last stage."""

        def loss_of_logits(logits: torch.Tensor, index: slice):
            answers = tokens[index, -answer_length:]
            predicting = logits[:, -answer_length - 1 : -1].flatten(0, 1)
            log_probs = token_log_probs(predicting, answers.flatten(), vocab_size=self._architecture.vocab_size)
            return loss(index, log_probs.view(answers.shape))

        self._forward_backward(tokens, self._micro_batches(*tokens.shape), loss_of_logits, forward_only=forward_only)

    def _forward_backward(
        self,
        tokens: torch.Tensor,
        micro_batches: int,
        loss: Callable[[torch.Tensor, slice], tuple[torch.Tensor, dict]],
        *,
        forward_only: bool,
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size = tokens.shape[0] // micro_batches

        def forward(indices: Iterator[int], model: Any):
            index = slice(start := next(indices) * size, start + size)
            logits = model(input_ids=tokens[index], position_ids=None, attention_mask=None)
            return logits, functools.partial(loss, index=index)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(range(micro_batches)),
            model=self._models,
            num_microbatches=micro_batches,
            seq_length=tokens.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
        )

    def _micro_batches(self, samples: int, length: int) -> int:
        """The fewest equal micro-batches that fill the pipeline and keep each within ``_MICRO_BATCH_TOKENS``."""
        for count in range(min(self._pipeline_stages, samples), samples):
            if samples % count == 0 and samples // count * length <= _MICRO_BATCH_TOKENS:
                return count
        return samples

    # ------------------------------------------------------------------ ranks
    @property
    def _data_size(self) -> int:
        return self._groups.get_data_parallel_world_size()

    def _share(self, rows: torch.Tensor) -> torch.Tensor:
        """This data parallel rank's part of the samples."""
        return rows.chunk(self._data_size)[self._groups.get_data_parallel_rank()]

    def _on_first_rank(self, value: Any, *, last_stage: bool = False) -> Any:
        """``value`` on one rank, ``None`` on the others."""
        first = self._groups.get_tensor_model_parallel_rank() == self._groups.get_data_parallel_rank() == 0
        stage = self._groups.is_pipeline_last_stage() if last_stage else self._groups.is_pipeline_first_stage()
        return value if first and stage else None
