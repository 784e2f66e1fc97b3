"""The real command killed ten times over the bytes that it writes, and resumed each time."""

import contextlib
import filecmp
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from glm5next_plugin.adapters.megatron.convert import convert, open_source
from glm5next_plugin.adapters.megatron.torch_dist_target import TorchDistTarget
from glm5next_plugin.checkpoint.job import run_job
from glm5next_plugin.checkpoint.released_target import ReleasedTarget
from glm5next_plugin.checkpoint.synthetic import PatternSource
from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes import variants

from ..command import GLM5NEXT, run_convert, run_glm5next

KILLS, WORKERS = 10, 2


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """245 MB as safetensors and as torch_dist: enough for two workers, in units of half a layer."""
    architecture = variants.tiny(
        num_hidden_layers=12, hidden_size=768, moe_intermediate_size=256, intermediate_size=1024, kv_lora_rank=256
    )
    folder = tmp_path_factory.mktemp("sources")
    made = PatternSource(architecture, seed=5)
    run_job(made, ReleasedTarget(made, workers=1, max_shard_bytes=60_000_000), folder / "released")
    convert(folder / "released", folder / "torch_dist")
    return {"torch_dist": folder / "released", "released": folder / "torch_dist", "fp8": folder / "torch_dist"}


def written_by(processes) -> int:
    """Bytes that these processes handed to write calls."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.io_counters().write_chars
    return total


def recorded(partial: Path) -> set[int]:
    """Numbers of the units that the journal calls done."""
    file = partial / ".done"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return {json.loads(line)[0] for line in lines if line.endswith("\n")}


def kill_after(command: list[str], nbytes: int) -> int:
    """Run a command, kill it once it wrote so much, and return what it had written when it was stopped."""
    # nice, so that on a busy machine this process still looks often enough to stop it in time
    root = psutil.Popen(["nice", "-n", "19", *command], stderr=subprocess.PIPE, text=True)
    family = [root]
    while written_by(family) < nbytes:
        family = [root, *root.children(recursive=True)]
        if root.poll() is not None:
            pytest.fail(f"it ended before it wrote {nbytes} bytes, with {root.returncode}: {root.stderr.read()}")
        time.sleep(0.002)
    # stopped first, so that what is counted is what a kill leaves
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.suspend()
    written = written_by(family)
    os.kill(root.pid, signal.SIGKILL)
    root.wait()
    root.stderr.close()
    return written


@pytest.mark.parametrize("kind", ["torch_dist", "released", "fp8"])
def test_killed_and_resumed_it_writes_what_an_uninterrupted_run_writes(kind, sources, tmp_path):
    source, target, partial = sources[kind], tmp_path / "target", tmp_path / ".target.partial"
    options = {"torch_dist": [], "released": ["--max-shard-size", "0.05"], "fp8": ["--fp8"]}[kind]
    options += ["--workers", str(WORKERS)]
    run_convert(source, tmp_path / "whole", *options).check_returncode()

    opened = open_source(source)
    if kind == "torch_dist":
        plan = TorchDistTarget(opened, dtype=opened.dtype, workers=WORKERS)
    else:
        plan = ReleasedTarget(opened, fp8=kind == "fp8", workers=WORKERS, max_shard_bytes=50_000_000)
    assert plan.workers == WORKERS
    sizes = {unit.number: unit.nbytes for unit in plan.units}
    total = sum(sizes.values())
    layers = {}
    for unit in plan.units:
        for piece in unit.pieces:
            layer = piece.name.split(".mlp.")[0].split(".self_attn.")[0]
            layers[layer] = layers.get(layer, 0) + piece.nbytes
    largest = max(layers.values())
    assert total > 20 * largest / 3

    between = 0
    for number in range(KILLS):
        before = recorded(partial)
        done = sum(sizes[unit] for unit in before)
        # in the middle of each tenth of the first nine tenths: the last one has to come before the command is through
        wanted = max(1, 9 * total * (2 * number + 1) // (20 * KILLS) - done)
        written = kill_after([GLM5NEXT, "convert", str(source), str(target), *options, "--resume"], wanted)
        after = recorded(partial)
        assert before <= after
        new = sum(sizes[unit] for unit in after - before)
        between += 0 < done + written < total
        # a journal line a unit and a message a piece are written as well
        redone = written - new
        assert redone <= largest + 100_000, (number, redone, largest)
        assert not target.exists()
        for name in ("config.json", "model.safetensors.index.json", ".metadata", "release/.metadata"):
            assert not (partial / name).exists(), name
        with pytest.raises((InputError, OSError)):
            open_source(partial).check()
    assert between >= 8

    refused = run_convert(source, target, *options)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    run_convert(source, target, *options, "--resume", "--verify").check_returncode()
    assert not partial.exists()
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())
    found = sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())
    assert found == files
    assert [file for file in files if not filecmp.cmp(tmp_path / "whole" / file, target / file, shallow=False)] == []


def test_interrupted_by_the_user_it_says_how_to_go_on_and_leaves_no_process(sources, tmp_path):
    process = psutil.Popen(
        [GLM5NEXT, "convert", str(sources["torch_dist"]), str(tmp_path / "target"), "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    family = [process]
    while written_by(family) < 30_000_000:
        family = [process, *process.children(recursive=True)]
        assert process.poll() is None
        time.sleep(0.002)
    assert len(family) >= 3
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume goes on" in message and "Traceback" not in message
    assert not any(member.is_running() for member in family)
    run_convert(sources["torch_dist"], tmp_path / "target", "--workers", "2", "--resume").check_returncode()
    assert run_glm5next("verify", sources["torch_dist"], tmp_path / "target").returncode == 0


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_its_workers_are_forked_whatever_the_environment_says_of_threads(terminal, sources, tmp_path):
    """A spawned worker imports everything again: seconds, and half a GB of memory."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    process = psutil.Popen(
        [GLM5NEXT, "convert", str(sources["torch_dist"]), str(tmp_path / "target"), "--workers", "2"],
        stderr=theirs,
        env=os.environ | {"OMP_NUM_THREADS": "4"},
    )
    os.close(theirs)
    family = []
    while written_by(family) < 10_000_000:
        family = process.children(recursive=True)
        assert process.poll() is None
        time.sleep(0.002)
    assert len(family) == 2
    assert all("spawn_main" not in " ".join(worker.cmdline()) for worker in family)
    shown = b""
    with contextlib.suppress(OSError):  # so a terminal ends
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    assert b"writing" in shown and f"{tmp_path / 'target'} written in".encode() in shown
