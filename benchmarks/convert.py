"""Rate and memory of ``glm5next convert`` against ``cp`` of the same files on the same disk.

    python benchmarks/convert.py --gb 8

A checkpoint with the layer shapes of the release and fewer experts is made, then copied and converted in turns: each
time its files are dropped from the page cache first, and the clock stops when what was written is on the disk. Memory
is the sum over all processes of the command of what is anonymous or shared in /proc/PID/smaps_rollup (proportional
share).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

import glm5next_plugin
from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.checkpoint.job import run_job
from glm5next_plugin.checkpoint.released_target import ReleasedTarget
from glm5next_plugin.checkpoint.synthetic import PatternSource
from glm5next_plugin.recipes import variants

GLM5NEXT = str(Path(sys.executable).with_name("glm5next"))
_MAXIMUM_MEMORY = 6e9


def architecture_of(gb: float) -> Architecture:
    """Layers of the release, as many as the size allows, with experts to fill it."""
    if gb >= 4:
        layers = dict(num_hidden_layers=8)
    else:
        # one of each attention and MLP, and a vocabulary that leaves them room
        layers = dict(num_hidden_layers=2, dsa_layers=[1], first_k_dense_replace=1, vocab_size=4096)
    experts = 1
    while _nbytes(variants.full(**layers, n_routed_experts=experts + 1, num_experts_per_tok=1)) <= gb * 1e9:
        experts += 1
    return variants.full(**layers, n_routed_experts=experts, num_experts_per_tok=1)


def _nbytes(architecture: Architecture) -> int:
    sizes = {"BF16": 2, "F32": 4}
    tensors = expected_tensors(architecture, vision=False, mtp=False).values()
    return sum(sizes[spec.dtype] * torch.Size(spec.shape).numel() for spec in tensors)


@dataclasses.dataclass
class Run:
    """One timed command: seconds, bytes that it wrote, and the most memory it held."""

    name: str
    seconds: float
    nbytes: int
    memory: int

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


def drop_from_cache(directory: Path) -> None:
    """Make the next read of these files come from the disk."""
    os.sync()
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def flush(directory: Path) -> None:
    """Wait until the files of a directory are on the disk."""
    for path in (*directory.rglob("*"), directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def memory_of(process: psutil.Process) -> int:
    """Anonymous and shared bytes of a process and its children, shared ones in proportion."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            fields = dict(
                line.split(":") for line in Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines()[1:]
            )
        except (OSError, ValueError):
            continue
        total += sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
    return total


def measure(name: str, command: list[str], source: Path, target: Path) -> Run:
    """Run a command that makes ``target`` of ``source``, both on the disk at the start and at the end."""
    shutil.rmtree(target, ignore_errors=True)
    drop_from_cache(source)
    started, peak = time.monotonic(), 0
    process = psutil.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        peak = max(peak, memory_of(process))
        time.sleep(0.2)  # reading it costs the kernel milliseconds of a core
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr.read()}")
    flush(target)
    seconds = time.monotonic() - started
    return Run(name, seconds, sum(file.stat().st_size for file in target.rglob("*") if file.is_file()), peak)


def main(
    gb: Annotated[float, typer.Option(help="Size of the BF16 checkpoint, in GB.")] = 8.0,
    directory: Annotated[Path, typer.Option(help="Where to work; the disk to measure.")] = Path("benchmark-convert"),
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is run; the median counts.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Processes of the conversion.")] = min(8, os.cpu_count() or 1),
    fp8: Annotated[bool, typer.Option(help="Also from and to FP8.")] = True,
    minimum_of_cp: Annotated[
        float, typer.Option(help="Fail below this part of cp's rate; at 1 GB the start of the command counts too much.")
    ] = 0.6,
    results: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measure, print a table, and fail if a BF16 conversion is too slow or takes more than 6 GB of memory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        runs = _run_all(gb, directory, rounds, workers, fp8)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report = _report(runs, gb, workers)
    _print(report)
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(report, indent=2) + "\n")
    judged = [row for row in report["runs"] if row["judged"]]
    if any(row["of_cp"] < minimum_of_cp or row["memory"] > _MAXIMUM_MEMORY for row in judged):
        raise SystemExit(1)


def _run_all(gb: float, directory: Path, rounds: int, workers: int, fp8: bool) -> list[Run]:
    source, torch_dist, back, copy = (directory / name for name in ("source", "torch_dist", "back", "copy"))
    pattern = PatternSource(architecture_of(gb))
    run_job(pattern, ReleasedTarget(pattern, workers=1), source)
    convert = [GLM5NEXT, "convert", "--workers", str(workers)]
    runs = []
    for _ in range(rounds):
        runs.append(measure("cp", ["cp", "-r", source, copy], source, copy))
        shutil.rmtree(copy)
        runs.append(measure("BF16 to torch_dist", [*convert, source, torch_dist], source, torch_dist))
        runs.append(measure("torch_dist to BF16", [*convert, torch_dist, back], torch_dist, back))
        shutil.rmtree(back)
    if fp8:
        quantised = directory / "fp8"
        runs.append(measure("torch_dist to FP8", [*convert, torch_dist, quantised, "--fp8"], torch_dist, quantised))
        runs.append(measure("FP8 to torch_dist", [*convert, quantised, torch_dist], quantised, torch_dist))
    return runs


def _report(runs: list[Run], gb: float, workers: int) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(run.rate for run in runs if run.name == name)

    released = _nbytes(variants.full())
    rows = []
    for name in dict.fromkeys(run.name for run in runs):
        rows.append(
            {
                "name": name,
                "rate": median(name),
                "rates": [run.rate for run in runs if run.name == name],
                "of_cp": median(name) / median("cp"),
                "memory": max(run.memory for run in runs if run.name == name),
                "judged": name in ("BF16 to torch_dist", "torch_dist to BF16"),
                # what an FP8 export writes is about half
                "full_model_seconds": released * (0.51 if name == "torch_dist to FP8" else 1) / median(name),
            }
        )
    return {
        "date": datetime.date.today().isoformat(),
        "glm5next_plugin": glm5next_plugin.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB memory",
        "gb": gb,
        "workers": workers,
        "full_model_bytes": released,
        "runs": rows,
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['gb']:g} GB, {report['workers']} workers, {report['machine']}")
    for column in ("", "MB/s written", "of cp", "memory, GB", f"{report['full_model_bytes'] / 1e9:.0f} GB model, min"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report["runs"]:
        table.add_row(
            row["name"],
            f"{row['rate'] / 1e6:.0f}",
            f"{row['of_cp']:.2f}",
            f"{row['memory'] / 1e9:.2f}",
            f"{row['full_model_seconds'] / 60:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
