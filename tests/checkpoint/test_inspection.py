"""``glm5next inspect``: the figures of the release as literals, and what is wrong with a checkpoint."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from glm5next_plugin.adapters.megatron.convert import convert
from glm5next_plugin.checkpoint.synthetic import make_header_only
from glm5next_plugin.recipes import variants

from ..command import GLM5NEXT, run_glm5next
from .editing import INDEX, edited

# tensors by class of the FP8 release, scales included
CLASSES = {
    "routed_experts": 72_576,
    "mtp": 1_760,
    "kda": 510,
    "vision": 347,
    "hyper_connections": 270,
    "shared_experts": 252,
    "dsa": 121,
    "norms": 91,
    "router": 84,
    "indexer": 77,
    "dense_mlp": 18,
    "embed_tokens": 1,
    "lm_head": 1,
}

# a process's peak counts that of the one it was forked from; this one is small
MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Headers and index of the FP8 release; its 328 GB are holes in the files."""
    path = tmp_path_factory.mktemp("release") / "checkpoint"
    return make_header_only(path, variants.full(), shards=62, fp8_block=(128, 128))


def test_the_release_is_counted_in_seconds(release):
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, GLM5NEXT, "inspect", str(release), "--json"], capture_output=True, text=True
    )
    seconds = time.monotonic() - started
    assert result.returncode == 0, result.stderr
    peak = int(result.stderr.split()[-1]) * 1024
    assert seconds < 20 and 100e6 < peak < 1e9, (seconds, peak)

    found = json.loads(result.stdout)
    assert found["format"] == "safetensors" and found["files"] == 62 and found["faults"] == []
    assert (found["text_tensors"], found["vision_tensors"], found["fp8_matrices"]) == (75_761, 347, 37_338)
    assert {name: members["tensors"] for name, members in found["classes"].items()} == CLASSES
    assert sum(members["tensors"] for members in found["classes"].values()) == 76_108
    assert round(found["file_bytes"] / 1e9, 1) == 328.3
    assert round(sum(members["nbytes"] for members in found["classes"].values()) / 1e9, 2) == 328.33
    kinds = ["kda/dense", "kda/moe", "dsa/moe"]
    assert [found["layers"].count(kind) for kind in kinds] == [3, 31, 11] and len(found["layers"]) == 45
    assert found["mtp_layers"] == 1
    dtypes = {}
    for members in found["classes"].values():
        for dtype, count in members["dtypes"].items():
            dtypes[dtype] = dtypes.get(dtype, 0) + count
    # fp32: a scale a matrix; A_log and dt_bias of 34 layers, 4 kinds of 45, a bias of 43 routers
    assert dtypes == {"F8_E4M3": 37_338, "F32": 37_338 + 2 * 34 + 4 * 45 + 43, "BF16": 76_108 - 2 * 37_338 - 291}


def test_the_bf16_release_has_the_same_names_without_scales(tmp_path):
    path = make_header_only(tmp_path / "bf16", variants.full(), shards=5)
    result = run_glm5next("inspect", path)
    assert result.returncode == 0
    assert "38,423 text and 347 vision tensors, 0 FP8 matrices" in result.stdout
    assert "5 files, 64" in result.stdout and result.stdout.endswith("complete\n")


def test_a_tensor_that_the_release_lacks_is_named_and_counted(release, tmp_path):
    """One header of 62 with a name changed, in both places: missing and unknown, and nothing else."""
    path = tmp_path / "changed"
    path.mkdir()
    for file in release.iterdir():
        (path / file.name).symlink_to(file)
    name = "model.language_model.layers.44.mlp.experts.287.down_proj.weight"
    index = json.loads((release / INDEX).read_text())
    shard = index["weight_map"][name]
    wrong = name.replace("287", "288")
    index["weight_map"][wrong] = index["weight_map"].pop(name)
    (path / INDEX).unlink()
    (path / INDEX).write_text(json.dumps(index))
    length = int.from_bytes((release / shard).open("rb").read(8), "little")
    (path / shard).unlink()
    with (release / shard).open("rb") as whole, (path / shard).open("wb") as changed:
        header = whole.read(8 + length)
        assert header.count(f'"{name}"'.encode()) == 1
        changed.write(header.replace(f'"{name}"'.encode(), f'"{wrong}"'.encode()))
    os.truncate(path / shard, (release / shard).stat().st_size)
    result = run_glm5next("inspect", path, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert found["classes"]["unknown"]["tensors"] == 1
    assert found["classes"]["routed_experts"]["tensors"] == 72_575
    faults = "\n".join(found["faults"])
    assert f"{name} is missing" in faults and wrong in faults and shard in faults
    assert len(found["faults"]) == 3, faults  # missing, unknown, and a scale without its weight


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update({"lm_head.bias": torch.zeros(3)}), "lm_head.bias"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(3, 4)}),
            "has shape [3, 4]; needed by config.json: [64, 64]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(64, 64, dtype=torch.float16)}), "has dtype F16"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_a_fault_is_listed_and_the_exit_code_says_so(edit, fault, whole, tmp_path):
    path = edited(whole, tmp_path / "edited", edit)
    result = run_glm5next("inspect", path)
    assert result.returncode == 1 and fault in result.stdout and result.stdout.endswith("1 fault\n")
    assert json.loads(run_glm5next("inspect", path, "--json").stdout)["faults"]


def test_torch_dist_is_counted_as_what_it_was_made_from(whole, tmp_path):
    convert(whole, tmp_path / "dist")
    before, after = (json.loads(run_glm5next("inspect", p, "--json").stdout) for p in (whole, tmp_path / "dist"))
    assert after["format"] == "torch_dist" and after["faults"] == []
    for key in ("layers", "mtp_layers", "text_tensors", "vision_tensors", "classes"):
        assert after[key] == before[key], key
