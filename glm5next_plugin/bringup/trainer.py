"""What the bring-up asks of a trainer, and the group of processes that one trainer is."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

from glm5next_plugin.health.metrics import Precision

from .process import Worker, gather


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """What a trainer is built from.

    Attributes:
        checkpoint: released checkpoint to start from.
        dtype: precision of parameters and activations; the optimizer's are fp32.
        tensor_parallel, pipeline_parallel, expert_parallel: sizes; they make :attr:`world` processes.
        learning_rate: constant.
    """

    checkpoint: Path
    dtype: Precision
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    learning_rate: float

    @property
    def world(self) -> int:
        """Processes: expert parallel ranks are drawn from tensor and data parallel ones."""
        return math.lcm(self.tensor_parallel, self.expert_parallel) * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        """Ranks that share the samples among themselves."""
        return self.world // (self.tensor_parallel * self.pipeline_parallel)


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """Samples of one optimizer step.

    Attributes:
        tokens: int64 ``[samples, length]``, prompt and answer.
        old: fp32 ``[samples, answer_length]``, the trainer's log-probabilities before the rollout's first update.
        advantages: fp32 ``[samples]``.
        mask: bool ``[samples, answer_length]``, tokens that count.
    """

    tokens: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True)
class UpdateFigures:
    """What an optimizer step reports.

    Attributes:
        grad_norm: before clipping.
        kl: mean over the minibatch's tokens of old minus new log-probability, before this step's update.
    """

    grad_norm: float
    kl: float


class Trainer(Protocol):
    """One rank of a trainer, in a process of its own; every rank gets every call, in the same order.

    The rank that has a result returns it and the others ``None``; recordings of :meth:`probe` are merged. Built as
    ``target(settings=TrainerSettings, rank=int, store=str)``, where ``store`` is a file for torch.distributed.
    """

    def weights(self) -> dict[str, str] | None:
        """Released name to digest of every tensor of the text model, as the parameters are now."""

    def log_probs(self, tokens: torch.Tensor, answer_length: int) -> torch.Tensor | None:
        """fp32 ``[samples, answer_length]`` of the last tokens of ``tokens`` ``[samples, length]``."""

    def update(self, minibatch: Minibatch) -> UpdateFigures | None:
        """One optimizer step on the clipped policy loss, averaged over the minibatch's tokens."""

    def export(self, directory: Path) -> dict[str, str] | None:
        """Write a released checkpoint with values in the trainer's precision; digests as :meth:`weights`."""

    def probe(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Intermediate results, as :mod:`.probe` names them; what other ranks hold may be left out."""


class TrainerGroup:
    """All ranks of a trainer.

    Args:
        target: ``"module:class"`` of the :class:`Trainer`.
        settings: of the trainer.
        logs: directory for a log a rank.
        setup: as in :class:`.process.Worker`.
    """

    def __init__(self, target: str, settings: TrainerSettings, logs: Path, *, setup: str | None = None):
        self._directory = tempfile.TemporaryDirectory(prefix="glm5next-bringup-")
        store = str(Path(self._directory.name) / "store")
        self._ranks = [
            Worker(
                f"trainer rank {rank}",
                target,
                dict(settings=settings, rank=rank, store=store),
                logs / f"trainer-{rank}.log",
                setup=setup,
            )
            for rank in range(settings.world)
        ]

    def wait_until_built(self, timeout: float) -> None:
        """Wait until every rank has its model.

        Raises:
            InputError: a setting or the checkpoint was refused.
            WorkerError: a rank failed.
        """
        gather(self._ranks, timeout)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of :class:`Trainer` in every rank.

        Raises:
            WorkerError: a rank failed.
        """
        for rank in self._ranks:
            rank.submit(method, *args)
        answers = gather(self._ranks, timeout)
        if method == "probe":
            return {name: value for answer in reversed(answers) for name, value in answer.items()}
        return next(answer for answer in answers if answer is not None)

    def release(self) -> None:
        """Let idle ranks go, without waiting for their end; no call can follow."""
        for rank in self._ranks:
            rank.release()

    def close(self) -> None:
        """End all ranks and wait for them."""
        self.release()
        for rank in self._ranks:
            rank.close()
        self._directory.cleanup()
