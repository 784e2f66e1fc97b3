"""``glm5next bringup``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

_TRAINER = "glm5next_plugin.adapters.megatron.bringup_trainer:MegatronTrainer"


def bringup(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Released checkpoint to start from. Default: a small one with random weights is made."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="GRPO steps.  [default: 25]")] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for metrics.jsonl, report.html, logs and weights; files there are replaced.")
    ] = Path("bringup"),
    seed: Annotated[int, typer.Option(min=0, help="Of the made checkpoint, the prompts and the sampling.")] = 0,
    lr: Annotated[
        float | None, typer.Option(min=0.0, help="Learning rate of Adam; 0 trains nothing.  [default: 0.004]")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Precision of trainer and rollout engine.")] = "fp32",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the trainer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size of the trainer.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel size of the trainer.")] = 1,
) -> None:
    """Show that a set-up works: checkpoint in, RL steps, checkpoint out, every figure in its range.

    Runs on a CPU. GRPO steps on a small task: a rollout engine (the model of transformers, in its own process)
    samples, Megatron trains, and the weights go back in the released spelling. Every step checks that both sides
    compute the same log-probabilities and hold the same weights. OUT/report.html says what was found.

    Exit codes: 0 healthy, 1 a figure is unhealthy, 2 bad input or setting, 130 interrupted.

    [bold]Examples[/bold]

    [cyan]glm5next bringup[/cyan]  the whole job in a few minutes

    [cyan]glm5next bringup --dtype bf16 --steps 5[/cyan]  the same in bf16

    [cyan]glm5next bringup --tp 2 --pp 2 --steps 2[/cyan]  on four processes

    [cyan]glm5next bringup --checkpoint DIR --steps 3[/cyan]  another checkpoint in the released format
    """
    from rich.console import Console

    from glm5next_plugin.bringup.loop import DEFAULT_LEARNING_RATE, DEFAULT_STEPS, BringupSettings, run_bringup
    from glm5next_plugin.health.report import verdict_line

    settings = BringupSettings(
        out=out,
        checkpoint=checkpoint,
        steps=DEFAULT_STEPS if steps is None else steps,
        seed=seed,
        learning_rate=DEFAULT_LEARNING_RATE if lr is None else lr,
        dtype=dtype,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        expert_parallel=ep,
    )
    console = Console(highlight=False)
    table = _StepTable(console, dtype)
    result = run_bringup(
        settings,
        trainer=_TRAINER,
        on_row=table.print_row,
        on_stage=lambda line: console.print(line, style="dim", soft_wrap=True),
    )
    console.print()
    for finding in result.findings:
        console.print(f"[bold red]{finding.title}[/bold red]: {finding.detail}", soft_wrap=True)
        for suspect in finding.suspects:
            console.print(f"  suspect: {suspect}", soft_wrap=True)
    style = "bold red" if result.findings else "bold yellow" if result.interrupted else "bold green"
    console.print(verdict_line(result.rows, result.findings, result.interrupted), style=style, soft_wrap=True)
    console.print(f"report: {result.report}", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(130)
    if result.findings:
        raise typer.Exit(1)


class _StepTable:
    """One row a step, as it comes; figures outside their healthy range are red."""

    # metric: title and width; the whole row fits 80 columns
    _COLUMNS = {
        "step": ("step", 4),
        "raw_reward": ("raw_reward", 10),
        "train_rollout_logprob_abs_diff": ("logprob_diff", 12),
        "train_rollout_logprob_abs_diff_max": ("its max", 9),
        "nonfinite_logprobs": ("nonfinite", 9),
        "ppo_kl": ("ppo_kl", 10),
        "grad_norm": ("grad_norm", 10),
        "seconds": ("seconds", 7),
    }

    def __init__(self, console, dtype: str):
        self._console = console
        self._dtype = dtype
        self._started = False

    def print_row(self, row: Mapping[str, float | None]) -> None:
        from glm5next_plugin.health.report import format_value
        from glm5next_plugin.health.verdict import unhealthy_metrics

        if not self._started:
            self._print([(title, "bold") for title, _ in self._COLUMNS.values()])
            self._started = True
        unhealthy = unhealthy_metrics(row, self._dtype)
        self._print([(format_value(row[name]), "bold red" if name in unhealthy else "") for name in self._COLUMNS])

    def _print(self, cells: list[tuple[str, str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        for _, width in self._COLUMNS.values():
            line.add_column(justify="right", width=width, no_wrap=True)
        line.add_row(*(Text(text, style=style) for text, style in cells))
        self._console.print(line)
