"""The bring-up: GRPO steps between a trainer and a rollout engine, every figure checked."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError
from glm5next_plugin.health.logprobs import finite_tokens, logprob_difference
from glm5next_plugin.health.metrics import BY_NAME, PRECISIONS, Precision
from glm5next_plugin.health.report import Table, write_report
from glm5next_plugin.health.verdict import Finding, judge

from .diagnosis import probe_finding, probe_table, weight_finding
from .engine import Samples
from .grpo import group_advantages
from .probe import compare
from .process import Worker, WorkerError
from .seeds import stream_seed
from .task import SymbolClassTask
from .trainer import Minibatch, TrainerGroup, TrainerSettings, UpdateFigures
from .weights import unequal_tensors

DEFAULT_STEPS = 25
DEFAULT_LEARNING_RATE = 4e-3
PROMPTS = 32
SAMPLES_PER_PROMPT = 8
MINIBATCHES = 2
# a run of the demo that is at least this long has to learn its task
_LEARNING_STEPS = 20
_PROBED_SAMPLES = 16
_TIMEOUT = 900.0
_ENGINE = "glm5next_plugin.bringup.engine:HfEngine"


@dataclasses.dataclass(frozen=True)
class BringupSettings:
    """What a bring-up runs.

    Attributes:
        out: directory for metrics.jsonl, report.html, logs and the last weights.
        checkpoint: released checkpoint; ``None`` makes a small one with random weights in ``out``.
        steps: GRPO steps.
        seed: of the made checkpoint, the prompts and the sampling.
        learning_rate: of Adam, constant; 0 leaves the weights as they are.
        dtype: precision of trainer and engine.
        tensor_parallel, pipeline_parallel, expert_parallel: of the trainer.
    """

    out: Path
    checkpoint: Path | None = None
    steps: int = DEFAULT_STEPS
    seed: int = 0
    learning_rate: float = DEFAULT_LEARNING_RATE
    dtype: Precision = "fp32"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self):
        least = {"steps": 1, "seed": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InputError(f"{name} is {getattr(self, name)}; needed: at least {bound}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise InputError(f"the learning rate is {self.learning_rate}; needed: 0 or a positive number")
        if self.dtype not in PRECISIONS:
            raise InputError(f"dtype is {self.dtype!r}; needed: one of {', '.join(PRECISIONS)}")

    @property
    def must_learn(self) -> bool:
        """Whether the reward has to rise: a made checkpoint, the tuned learning rate, enough steps."""
        tuned = self.checkpoint is None and self.learning_rate == DEFAULT_LEARNING_RATE
        return tuned and self.steps >= _LEARNING_STEPS


@dataclasses.dataclass
class BringupResult:
    """What a bring-up found.

    Attributes:
        rows: one a step: ``step`` and every metric, ``None`` for a figure that is not finite.
        findings: what is unhealthy, the most telling first; empty for a healthy run.
        report: the HTML page.
        interrupted: whether Ctrl-C cut it short.
    """

    rows: list[dict[str, float | None]]
    findings: list[Finding]
    report: Path
    interrupted: bool = False


def run_bringup(
    settings: BringupSettings,
    *,
    trainer: str,
    on_row: Callable[[Mapping[str, float | None]], None] = lambda row: None,
    on_stage: Callable[[str], None] = lambda line: None,
    worker_setup: str | None = None,
) -> BringupResult:
    """Run the steps and write ``metrics.jsonl`` and ``report.html``, also for a run that fails or is interrupted.

    Args:
        settings: what to run.
        trainer: ``"module:class"`` of a :class:`.trainer.Trainer`.
        on_row: called with the row of every finished step.
        on_stage: called with a line as set-up advances.
        worker_setup: ``"module:callable"``, called in every worker process before it builds anything, with the target
            that it will build.

    Raises:
        InputError: a setting or a checkpoint that trainer or engine refuses.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    run = _Run(settings, on_row)
    interrupted = False
    try:
        run.start(trainer, on_stage, worker_setup)
        try:
            run.steps()
        except InputError as error:  # what was accepted at the start and is refused now is a fault of the run
            run.found.insert(0, Finding("a step failed", str(error)))
    except WorkerError as error:
        run.found.insert(0, Finding("a process failed", str(error)))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        run.close()
    whole = len(run.rows) == settings.steps
    findings = run.found + judge(run.rows, settings.dtype, must_learn=settings.must_learn and whole)
    report = settings.out / "report.html"
    write_report(
        report,
        settings=_described(settings),
        rows=run.rows,
        findings=findings,
        precision=settings.dtype,
        tables=run.tables,
        interrupted=interrupted,
    )
    return BringupResult(run.rows, findings, report, interrupted)


class _Run:
    """State of a bring-up: the two sides, the rows and what was found so far."""

    def __init__(self, settings: BringupSettings, on_row: Callable[[Mapping[str, float | None]], None]):
        self._settings = settings
        self._on_row = on_row
        self._engine: Worker | None = None
        self._trainer: TrainerGroup | None = None
        self._weights: Path | None = None
        self._metrics: TextIO | None = None
        self.rows: list[dict[str, float | None]] = []
        self.found: list[Finding] = []
        self.tables: list[Table] = []

    # ------------------------------------------------------------------ set-up
    def start(self, trainer: str, on_stage: Callable[[str], None], setup: str | None) -> None:
        """Both sides from the same checkpoint; what the trainer imported must equal what the engine read."""
        s = self._settings
        checkpoint = s.checkpoint
        if checkpoint is None:
            checkpoint = s.out / "checkpoint"
            on_stage(f"making a small checkpoint in {checkpoint}")
            _make_checkpoint(checkpoint, s.seed)
        self._architecture = Architecture.from_pretrained(checkpoint)
        self._task = SymbolClassTask.for_architecture(self._architecture)
        trainer_settings = TrainerSettings(
            checkpoint.resolve(), s.dtype, s.tensor_parallel, s.pipeline_parallel, s.expert_parallel, s.learning_rate
        )
        samples = PROMPTS * SAMPLES_PER_PROMPT // MINIBATCHES
        if samples % trainer_settings.data_parallel:
            raise InputError(
                f"expert_parallel {s.expert_parallel} with tensor_parallel {s.tensor_parallel} makes "
                f"{trainer_settings.data_parallel} data parallel ranks; needed: a divisor of {samples} samples"
            )
        self._metrics = (s.out / "metrics.jsonl").open("w")
        on_stage("starting the rollout engine (transformers) and the trainer, each in its own process")
        self._engine = Worker("the rollout engine", _ENGINE, dict(dtype=s.dtype), s.out / "engine.log", setup=setup)
        self._trainer = TrainerGroup(
            trainer,
            trainer_settings,
            s.out,
            setup=setup,
        )
        self._engine.result(_TIMEOUT)
        read = self._engine.call("load", checkpoint.resolve(), timeout=_TIMEOUT)
        self._trainer.wait_until_built(_TIMEOUT)
        self._compare_weights(self._train("weights"), read, "after the import")

    def close(self) -> None:
        """End both sides, whatever they do."""
        sides = [side for side in (self._engine, self._trainer) if side is not None]
        for side in sides:
            side.release()
        for side in sides:
            side.close()
        if self._metrics is not None:
            self._metrics.close()

    # ------------------------------------------------------------------ steps
    def steps(self) -> None:
        """All steps, or fewer when going on would say nothing: NaN, or weights that do not arrive."""
        for step in range(1, self._settings.steps + 1):
            transferred = self._step(step)
            row = self.rows[-1]
            if not transferred or row["nonfinite_logprobs"] or row["grad_norm"] is None:
                return

    def _step(self, step: int) -> bool:
        """One GRPO step; whether the new weights arrived in the engine."""
        started = time.monotonic()
        prompts = self._task.prompts(PROMPTS, self._settings.seed, step)
        samples: Samples = self._engine.call(
            "sample",
            prompts.tokens,
            SAMPLES_PER_PROMPT,
            self._task.answer_length,
            stream_seed(self._settings.seed, step, "sampling"),
            timeout=_TIMEOUT,
        )
        tokens = torch.cat([prompts.tokens.repeat_interleave(SAMPLES_PER_PROMPT, dim=0), samples.answers], dim=1)
        rewards = self._task.reward(samples.answers, prompts.keys.repeat_interleave(SAMPLES_PER_PROMPT))
        old = self._train("log_probs", tokens, self._task.answer_length)
        sampled = torch.ones_like(samples.answers, dtype=torch.bool)
        difference = logprob_difference(old, samples.log_probs, sampled)
        agree = BY_NAME["train_rollout_logprob_abs_diff"].ranges[self._settings.dtype].holds(difference.mean)
        if not self.tables and (difference.nonfinite or not agree):
            self._bisect(tokens, step)

        mask = finite_tokens(old, samples.log_probs, sampled)
        advantages = group_advantages(rewards, SAMPLES_PER_PROMPT)
        minibatches = zip(*(x.chunk(MINIBATCHES) for x in (tokens, old, advantages, mask)), strict=True)
        updates: list[UpdateFigures] = [
            self._train("update", Minibatch(*minibatch)) for minibatch in minibatches if minibatch[-1].any()
        ]
        transferred = self._transfer_weights(step)
        self._record(
            step=step,
            raw_reward=rewards.mean().item(),
            train_rollout_logprob_abs_diff=difference.mean,
            train_rollout_logprob_abs_diff_max=difference.maximum,
            nonfinite_logprobs=difference.nonfinite,
            ppo_kl=_mean([update.kl for update in updates]),
            grad_norm=_mean([update.grad_norm for update in updates]),
            seconds=time.monotonic() - started,
        )
        return transferred

    def _transfer_weights(self, step: int) -> bool:
        """Export from the trainer, load in the engine, compare."""
        previous, self._weights = self._weights, self._settings.out / "weights" / f"step-{step}"
        if self._weights.exists():
            shutil.rmtree(self._weights)
        exported = self._train("export", self._weights.resolve())
        held = self._engine.call("load", self._weights.resolve(), timeout=_TIMEOUT)
        if previous is not None:
            shutil.rmtree(previous)
        return self._compare_weights(exported, held, f"after the update of step {step}")

    def _compare_weights(self, trainer: Mapping[str, str], engine: Mapping[str, str], when: str) -> bool:
        lines = unequal_tensors(trainer, engine)
        if lines:
            self.found.append(weight_finding(lines, when))
        return not lines

    def _bisect(self, tokens: torch.Tensor, step: int) -> None:
        """Compare both sides part by part on samples spread over the batch."""
        probed = tokens[:: max(1, len(tokens) // _PROBED_SAMPLES)]
        comparisons = compare(
            self._architecture,
            self._train("probe", probed),
            self._engine.call("probe", probed, timeout=_TIMEOUT),
            self._settings.dtype,
        )
        self.found.append(probe_finding(comparisons, step))
        self.tables.append(probe_table(comparisons, step))

    def _train(self, method: str, *args: Any) -> Any:
        return self._trainer.call(method, *args, timeout=_TIMEOUT)

    def _record(self, **figures: float) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self.rows.append(row)
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        self._on_row(row)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _make_checkpoint(path: Path, seed: int) -> None:
    from glm5next_plugin.checkpoint.synthetic import make_checkpoint

    make_checkpoint(path, "demo", seed=seed, vision=True, mtp=True, overwrite=True)


def _described(settings: BringupSettings) -> dict[str, str]:
    """The settings, and what a reader of the report should know about the run."""
    described = {field.name: str(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    described["checkpoint"] = described["checkpoint"] if settings.checkpoint else "made, with random weights"
    described["samples a step"] = f"{PROMPTS} prompts x {SAMPLES_PER_PROMPT} samples, {MINIBATCHES} minibatches"
    best = float(SymbolClassTask.best_score_without_prompt())
    described["best mean raw_reward of a policy that ignores the prompt"] = f"{best:g}"
    return described
