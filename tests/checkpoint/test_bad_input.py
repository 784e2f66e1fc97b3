"""Bad input through the real command: one error that names file and tensor, exit code 2, and nothing left behind."""

import json
import os
import pickle
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5next_plugin.checkpoint import job
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.released_target import ReleasedTarget
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.checkpoint.torch_dist_format import DistributedTensors
from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.variants import demo
from tests.command import GLM5NEXT, run_convert, run_glm5next

from .editing import INDEX

L = "model.language_model.layers."
FIRST, SECOND, THIRD, LAST = (f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5))
HEAD = "lm_head.weight"  # in the third shard
K_PROJ = f"{L}1.self_attn.k_proj.weight"  # in the first shard
MERGER, LAST_TENSOR = "model.visual.merger.proj.weight", "model.visual.blocks.0.mlp.down_proj.bias"  # in the fourth
FP8_NAME = f"{L}3.self_attn.q_b_proj.weight"  # in the second shard
PARTIAL = ".out.partial"
LINEAR_K = "decoder.layers.1.self_attention.linear_k.weight"


@pytest.fixture(scope="module")
def dist(whole, tmp_path_factory) -> Path:
    """The same model as a torch_dist checkpoint."""
    target = tmp_path_factory.mktemp("dist") / "checkpoint"
    run_convert(whole, target).check_returncode()
    return target


@pytest.fixture
def source(whole, tmp_path) -> Path:
    """A copy of the sharded checkpoint that a test may spoil."""
    return shutil.copytree(whole, tmp_path / "source")


@pytest.fixture
def dist_source(dist, tmp_path) -> Path:
    """A copy of the torch_dist checkpoint that a test may spoil."""
    return shutil.copytree(dist, tmp_path / "source")


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    """The command's temporary files would lie in the folder that is compared."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


def listing(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Everything below a folder, files with size and time; the lock is held only while a job runs."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.stat()
        if path.name != ".lock":
            found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns) if path.is_file() else None
    return found


def the_error(finished: subprocess.CompletedProcess) -> str:
    """The one error on stderr, beside which only the progress may stand."""
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if not line.startswith("writing: ")]
    assert line.startswith("glm5next: error: ")
    assert line.count("glm5next: error:") == 1
    return line


def refused(tmp_path: Path, *arguments: Path | str, named: list[str]) -> str:
    """Run the command, which must refuse, name these and leave everything as it was; stderr."""
    before = listing(tmp_path)
    finished = run_glm5next(*arguments)
    message = the_error(finished)
    for text in named:
        assert text in message, message
    assert listing(tmp_path) == before
    return finished.stderr


def truncate(file: Path, nbytes: int = 1) -> None:
    os.truncate(file, file.stat().st_size - nbytes)


def edit_shard(path: Path, shard: str, edit) -> None:
    tensors = load_file(path / shard)
    edit(tensors)
    save_file(tensors, path / shard, {"format": "pt"})


def edit_index(path: Path, edit) -> None:
    index = json.loads((path / INDEX).read_text())
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def add(path: Path, shard: str, name: str, tensor: torch.Tensor) -> None:
    """A further tensor that both shard and index tell of."""
    edit_shard(path, shard, lambda tensors: tensors.update({name: tensor}))
    edit_index(path, lambda weight_map: weight_map.update({name: shard}))


def change(shard: str, name: str, function):
    return lambda path: edit_shard(path, shard, lambda tensors: tensors.update({name: function(tensors[name])}))


def filled_at_the_end(value: float):
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return fill


def with_config(**overrides):
    """A config that is consistent in itself, of another model."""
    return lambda path: (path / "config.json").write_text(json.dumps(demo(**overrides).released_config()))


def quantise(path: Path, *, scale: float | None) -> None:
    def edit(tensors):
        tensors[FP8_NAME] = tensors[FP8_NAME].to(torch.float8_e4m3fn)

    edit_shard(path, SECOND, edit)
    if scale is not None:
        add(path, SECOND, FP8_NAME + "_scale_inv", torch.full((1, 1), scale))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))


# ---------------------------------------------------------------------- a released checkpoint
RELEASED = {
    "shard missing": (lambda path: (path / THIRD).unlink(), [f"{THIRD} is missing", f"{HEAD} is missing"]),
    "shard truncated": (lambda path: truncate(path / LAST), [f"{LAST}: cut short", f"{MERGER} is missing"]),
    "index names what no file holds": (
        lambda path: edit_index(path, lambda weight_map: weight_map.update({f"{L}9.ghost": THIRD})),
        [f"1 fault - {INDEX} names {L}9.ghost in {THIRD}, which does not hold it"],
    ),
    "file holds what the index does not name": (
        lambda path: edit_index(path, lambda weight_map: weight_map.pop(HEAD)),
        [f"1 fault - {HEAD} in {THIRD} is not in {INDEX}"],
    ),
    "wrong shape": (
        change(THIRD, HEAD, lambda tensor: tensor[:63].clone()),
        [f"1 fault - {HEAD} ({HEAD} in {THIRD}) has shape [63, 64]", "needed by config.json: [64, 64]"],
    ),
    "wrong dtype": (
        change(FIRST, f"{L}0.self_attn.A_log", torch.Tensor.bfloat16),
        [f"1 fault - {L}0.self_attn.A_log ({L}0.self_attn.A_log in {FIRST}) has dtype BF16; needed: F32"],
    ),
    "unknown name": (
        lambda path: add(path, THIRD, "lm_head.bias", torch.zeros(64)),
        [f"1 fault - lm_head.bias (lm_head.bias in {THIRD}) is unknown"],
    ),
    "name in two shards": (
        lambda path: edit_shard(path, LAST, lambda tensors: tensors.update({HEAD: torch.zeros(64, 64).bfloat16()})),
        [f"1 fault - {HEAD} is there twice: {HEAD} in {THIRD}, and {HEAD} in {LAST}"],
    ),
    "scale without its weight": (
        lambda path: add(path, LAST, "lm_head.nothing.weight_scale_inv", torch.ones(1, 1)),
        [f"1 fault - lm_head.nothing.weight_scale_inv in {LAST} is a scale without its weight"],
    ),
    "FP8 without its scale": (
        lambda path: quantise(path, scale=None),
        [f"1 fault - {FP8_NAME} ({FP8_NAME} in {SECOND}) is FP8 without {FP8_NAME}_scale_inv"],
    ),
    "one layer fewer": (
        with_config(num_hidden_layers=3),
        [f"{L}4.eh_proj.weight in {THIRD}) is unknown: config.json has 3 layers and 1 MTP layers"],
    ),
    # its first twenty faults are tensors that no file holds
    "one layer more": (with_config(num_hidden_layers=5), [f"{L}4.hc_attn_fn is missing (BF16 [24, 256])"]),
    "another kpool": (
        with_config(index_kpool=16),
        [f"{L}3.self_attn.indexer.index_kpool_compress_ape in {SECOND}) has shape [4, 16]", "config.json: [16, 16]"],
    ),
    "another number of experts": (
        with_config(n_routed_experts=9),
        [f"{L}1.mlp.gate.weight in {FIRST}) has shape [8, 64]", f"{L}1.mlp.experts.8.gate_proj.weight is missing"],
    ),
}


@pytest.mark.parametrize("case", RELEASED)
def test_fault_of_a_released_checkpoint_is_refused_before_anything_is_written(case, source, tmp_path):
    spoil, named = RELEASED[case]
    spoil(source)
    stderr = refused(tmp_path, "convert", source, tmp_path / "out", named=[str(source), *named])
    assert "writing: " not in stderr


@pytest.mark.parametrize(
    ("shard", "name", "value"), [(FIRST, K_PROJ, float("nan")), (LAST, LAST_TENSOR, float("inf"))], ids=["nan", "last"]
)
def test_value_that_is_not_finite_is_found_while_writing_and_nothing_remains(shard, name, value, source, tmp_path):
    change(shard, name, filled_at_the_end(value))(source)
    assert CheckpointReader(source).names()[-1] == LAST_TENSOR
    named = [str(source), f"{name} ({name} in {shard}) has 1 values that are NaN or infinite"]
    assert "writing: " in refused(tmp_path, "convert", source, tmp_path / "out", named=named)


def test_scale_that_is_not_finite_is_found_where_fp8_is_copied(source, tmp_path):
    quantise(source, scale=float("nan"))
    command = ("slice", source, tmp_path / "out", "--layers", "0-3")
    assert "writing: " in refused(
        tmp_path, *command, named=[f"{FP8_NAME}_scale_inv ({FP8_NAME}_scale_inv in {SECOND}) has 1 values"]
    )


# ---------------------------------------------------------------------- a torch_dist checkpoint
class _Malicious:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def plant_malicious(path: Path) -> None:
    marker = path.parent / "marker"
    (path / "release/.metadata").write_bytes(pickle.dumps(_Malicious(f"touch {marker}")))


def plant_nan(path: Path) -> None:
    chunk = DistributedTensors(path / "release").tensors[LINEAR_K].chunks[0, 0]
    with (path / "release" / chunk.file).open("r+b") as file:
        file.seek(chunk.start)
        stream = bytearray(file.read(chunk.nbytes))
        # the values are what `torch.save` writes after the name of their file in the archive, at a multiple of 64
        first = -(-(chunk.start + stream.index(b"data/0") + len(b"data/0")) // 64) * 64
        file.seek(first)
        file.write(torch.full((1,), float("nan"), dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())


CARRIED = "carried-00005.safetensors"
DISTRIBUTED = {
    "distcp missing": (
        lambda path: (path / "release/__0_0.distcp").unlink(),
        ["__0_0.distcp is missing; it holds decoder.layers."],
    ),
    "distcp truncated": (
        lambda path: truncate(path / "release/__3_0.distcp"),
        ["1 fault - __3_0.distcp is cut short: ", "; output_layer.weight ends at "],
    ),
    "metadata malicious": (plant_malicious, ["release/.metadata is no metadata of torch_dist", "system"]),
    "metadata truncated": (
        lambda path: truncate(path / "release/.metadata", 1000),
        ["release/.metadata is no metadata of torch_dist"],
    ),
    "carried file missing": (
        lambda path: (path / "hf" / CARRIED).unlink(),
        [CARRIED, f"{LAST_TENSOR} is not in {CARRIED}"],
    ),
    "carried file truncated": (
        lambda path: truncate(path / "hf" / CARRIED),
        [f"{CARRIED}: cut short", f"{LAST_TENSOR} is not in {CARRIED}"],
    ),
    "one layer fewer": (
        lambda path: with_config(num_hidden_layers=3)(path / "hf"),
        [f"{L}4.eh_proj.weight in carried-00004.safetensors) is unknown"],
    ),
    "another backend": (
        lambda path: (path / "release/metadata.json").write_text('{"sharded_backend": "zarr"}'),
        ["release/metadata.json says 'zarr'; needed: 'torch_dist'"],
    ),
}


@pytest.mark.parametrize("case", DISTRIBUTED)
def test_fault_of_a_torch_dist_checkpoint_is_refused_before_anything_is_written(case, dist_source, tmp_path):
    spoil, named = DISTRIBUTED[case]
    spoil(dist_source)
    stderr = refused(tmp_path, "convert", dist_source, tmp_path / "out", named=[str(dist_source), *named])
    assert "writing: " not in stderr
    assert not (tmp_path / "marker").exists()


def test_nan_in_a_torch_dist_checkpoint_is_found_while_writing_and_nothing_remains(dist_source, tmp_path):
    plant_nan(dist_source)
    file = DistributedTensors(dist_source / "release").tensors[LINEAR_K].chunks[0, 0].file
    named = [f"release: {LINEAR_K} in {file} ({K_PROJ}) has 1 values that are NaN or infinite"]
    assert "writing: " in refused(tmp_path, "convert", dist_source, tmp_path / "out", named=named)


# ---------------------------------------------------------------------- targets and interrupted jobs
def test_occupied_target_is_refused_and_stays(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    refused(tmp_path, "convert", source, tmp_path / "out", named=[f"{tmp_path / 'out'} exists and is not empty"])


def test_target_that_is_a_file_is_refused_and_stays(source, tmp_path):
    (tmp_path / "out").write_text("x")
    refused(tmp_path, "convert", source, tmp_path / "out", named=[f"{tmp_path / 'out'} is a file"])


@pytest.mark.parametrize("target", ["source/out", "."], ids=["inside", "around"])
def test_target_and_source_in_one_another_are_refused(target, source, tmp_path):
    refused(tmp_path, "convert", source, tmp_path / target, "--overwrite", named=["lie in one another"])


def limited(nbytes: int, *arguments: Path | str) -> subprocess.CompletedProcess:
    """The command where no file can grow beyond this, which fails a write as a full disk does."""
    return subprocess.run(
        [GLM5NEXT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes)),
    )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """A folder with a source and what a conversion left there for which the disk was full after a unit or more."""
    folder = tmp_path_factory.mktemp("interrupted")
    # with this vocabulary the first of its files is the smallest
    make_checkpoint(folder / "source", demo(vocab_size=1024), seed=1, max_shard_bytes=300_000)
    finished = limited(240_000, "convert", folder / "source", folder / "out")
    (folder / "message").write_text(the_error(finished))
    return folder


@pytest.fixture
def left(interrupted, tmp_path) -> Path:
    """The partial directory of that conversion, for a test to go on from."""
    return shutil.copytree(interrupted / PARTIAL, tmp_path / PARTIAL)


def test_full_disk_keeps_what_is_written_and_says_how_to_go_on(interrupted):
    message = (interrupted / "message").read_text()
    assert f"{interrupted / 'out'} cannot be written" in message
    assert "make room and go on with --resume" in message
    assert not (interrupted / "out").exists()
    assert (interrupted / PARTIAL / ".done").read_text().splitlines()


def test_resumed_conversion_keeps_the_units_that_are_done_and_is_equal_to_its_source(interrupted, left, tmp_path):
    done = (left / "release/__0_0.distcp").stat().st_mtime_ns
    run_convert(interrupted / "source", tmp_path / "out", "--resume").check_returncode()
    assert (tmp_path / "out/release/__0_0.distcp").stat().st_mtime_ns == done
    assert not left.exists()
    assert run_glm5next("verify", interrupted / "source", tmp_path / "out").returncode == 0


def test_what_an_interrupted_job_left_is_refused_without_an_option(interrupted, left, tmp_path):
    named = [str(left), "an interrupted job", "--resume", "--overwrite"]
    refused(tmp_path, "convert", interrupted / "source", tmp_path / "out", named=named)


def test_resuming_with_other_settings_is_refused_and_says_what_differs(interrupted, left, tmp_path):
    command = ("convert", interrupted / "source", tmp_path / "out", "--resume", "--to", "released", "--fp8")
    refused(tmp_path, *command, named=[str(left), "target and units differ"])


def test_resuming_with_a_source_that_changed_is_refused_and_says_what_differs(interrupted, left, tmp_path):
    changed = shutil.copytree(interrupted / "source", tmp_path / "source")
    refused(tmp_path, "convert", changed, tmp_path / "out", "--resume", named=[str(left), "(source differ)"])


def test_overwriting_starts_anew_and_completes(interrupted, left, tmp_path):
    done = (left / "release/__0_0.distcp").stat().st_mtime_ns
    run_convert(interrupted / "source", tmp_path / "out", "--overwrite", "--verify").check_returncode()
    assert (tmp_path / "out/release/__0_0.distcp").stat().st_mtime_ns != done
    assert not left.exists()


def test_resuming_what_nobody_left_starts(source, tmp_path):
    run_convert(source, tmp_path / "out", "--resume", "--verify").check_returncode()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "temporary"}


def test_too_little_room_is_found_before_anything_is_made(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(job.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    reader = CheckpointReader(whole)
    before = listing(tmp_path)
    with pytest.raises(InputError, match=r"0\.00 GB needed, 0\.00 GB free"):
        job.run_job(reader, ReleasedTarget(reader), tmp_path / "out")
    assert listing(tmp_path) == before


# ---------------------------------------------------------------------- the other commands
@pytest.mark.parametrize("command", ["slice", "verify"])
def test_truncated_shard_is_refused_by_the_other_commands(command, source, tmp_path):
    truncate(source / LAST)
    arguments = {"slice": [tmp_path / "out", "--layers", "0-3"], "verify": [source]}[command]
    refused(tmp_path, command, source, *arguments, named=[f"{LAST}: cut short", f"{MERGER} is missing"])


def test_inspect_lists_a_truncated_shard(source, tmp_path):
    truncate(source / LAST)
    before = listing(tmp_path)
    finished = run_glm5next("inspect", source)
    assert finished.returncode == 1 and not finished.stderr
    assert f"- {LAST}: cut short" in finished.stdout and f"- {MERGER} is missing" in finished.stdout
    assert listing(tmp_path) == before


@pytest.mark.parametrize("command", ["convert", "slice", "verify", "inspect"])
def test_path_that_does_not_exist_is_refused(command, tmp_path):
    nowhere, out = tmp_path / "nowhere", tmp_path / "out"
    arguments = {"convert": [out], "slice": [out, "--layers", "0"], "verify": [nowhere], "inspect": []}[command]
    refused(tmp_path, command, nowhere, *arguments, named=[f"{nowhere}: no such directory"])
