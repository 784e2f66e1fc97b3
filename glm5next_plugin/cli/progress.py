"""How far a long job is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:  # it imports torch, which starts threads: see one_thread
    from glm5next_plugin.checkpoint.job import Progress as Report

_LOG_SECONDS = 30.0
_BAR_SECONDS = 0.1


@contextlib.contextmanager
def byte_progress(console: Console) -> Iterator[Report]:
    """A function to report with: stage, bytes done, bytes in all. What was done before the first report is not counted
    in the rate."""
    if console.is_terminal:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # would be a thread, and a process with threads cannot be forked
        ) as bar:
            tasks = {}
            drawn = 0.0

            def show(stage: str, done: int, total: int) -> None:
                nonlocal drawn
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total, completed=done)
                bar.update(tasks[stage], completed=done, total=total)
                if time.monotonic() - drawn > _BAR_SECONDS or done >= total:
                    bar.refresh()
                    drawn = time.monotonic()

            yield show
        return
    first: dict[str, tuple[float, int]] = {}
    last: dict[str, float] = {}

    def log(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        started, before = first.setdefault(stage, (now, done))
        if stage in last and now - last[stage] < _LOG_SECONDS:
            return
        last[stage] = now
        rate = (done - before) / (now - started) if now > started and done > before else 0
        estimate = f", {rate / 1e6:.0f} MB/s, {(total - done) / rate:.0f} s left" if rate else ""
        console.print(f"{stage}: {done / 1e9:.2f} of {total / 1e9:.2f} GB{estimate}", highlight=False)

    yield log
