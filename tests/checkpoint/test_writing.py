"""Writing: the released spelling, complete or not at all, index and files in step."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import glm5next_plugin.checkpoint.writing as writing
from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.staging import staged_directory
from glm5next_plugin.checkpoint.writing import CheckpointWriter
from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.variants import demo

from .editing import INDEX, stored_tensors

L = "model.language_model.layers."


def write(target: Path, source: Path, *, skip=(), **settings) -> Path:
    reader = CheckpointReader(source)
    with CheckpointWriter(target, reader.architecture, **settings) as writer:
        for name in reader.names():
            if not name.startswith(tuple(skip)):
                writer.add(name, reader.tensor(name))
    return target


def nothing_but(directory: Path, *names: str) -> bool:
    return {entry.name for entry in directory.iterdir()} == set(names)


def test_what_is_written_reads_back_bit_for_bit(whole, tmp_path):
    write(tmp_path / "out", whole, companions=whole, max_shard_bytes=200_000)
    reader, source = CheckpointReader(tmp_path / "out"), CheckpointReader(whole)
    reader.check()
    assert reader.names() == source.names()
    assert reader.architecture == source.architecture
    for name in reader.names():
        assert reader.spec(name).dtype == source.spec(name).dtype
        assert torch.equal(reader.tensor(name), source.tensor(name)), name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()
    assert nothing_but(tmp_path, "out")


def test_index_names_what_the_files_hold_and_nothing_else(whole, tmp_path):
    path = write(tmp_path / "out", whole, max_shard_bytes=200_000)
    index = json.loads((path / INDEX).read_text())
    held = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            held |= dict.fromkeys(opened.keys(), file.name)
    assert index["weight_map"] == held
    count = len(set(held.values()))
    assert count > 3
    assert set(held.values()) == {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored_tensors(path).values())


def test_shards_stay_within_their_size_unless_one_tensor_is_larger(whole, tmp_path):
    path = write(tmp_path / "out", whole, max_shard_bytes=9_000)
    for file in path.glob("*.safetensors"):
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 9_000 or len(sizes) == 1


def test_shards_are_readable_to_whoever_may_read_the_config(whole, tmp_path):
    path = write(tmp_path / "out", whole, max_shard_bytes=200_000)
    assert {file.stat().st_mode for file in path.iterdir()} == {(path / "config.json").stat().st_mode}


def test_no_more_than_one_shard_is_held_in_memory(whole, tmp_path, monkeypatch):
    held = []
    save = writing.save_file
    monkeypatch.setattr(writing, "save_file", lambda shard, *a, **k: held.append(len(shard)) or save(shard, *a, **k))
    reader = CheckpointReader(whole)
    with CheckpointWriter(tmp_path / "out", reader.architecture, max_shard_bytes=100_000) as writer:
        for name in reader.names():
            writer.add(name, reader.tensor(name))
            assert sum(tensor.nbytes for tensor in writer._shard.values()) <= 100_000
    assert sum(held) == len(reader.names()) and len(held) > 5


def test_config_is_the_full_released_one_of_what_was_written(whole, tmp_path):
    source = json.loads((whole / "config.json").read_text())
    path = write(tmp_path / "out", whole, dtype="float32")
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    assert config == source


def test_quantisation_of_the_source_is_not_claimed(whole, tmp_path):
    reader = CheckpointReader(whole)
    quantised = reader.architecture.released_config() | {"quantization_config": {"quant_method": "fp8"}}
    with CheckpointWriter(tmp_path / "out", Architecture.from_config(quantised)) as writer:
        for name in reader.names():
            writer.add(name, reader.tensor(name))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "keep"])
def test_dtype_is_the_wanted_one_and_five_kinds_stay_fp32(dtype, tmp_path):
    from glm5next_plugin.checkpoint.inventory import expected_tensors

    architecture = demo()
    given = {}
    with CheckpointWriter(tmp_path / "out", architecture, dtype=dtype) as writer:
        for i, (name, spec) in enumerate(expected_tensors(architecture).items()):
            given[name] = torch.randn(spec.shape)
            if spec.dtype == "BF16" and i % 2:
                given[name] = given[name].bfloat16()
            writer.add(name, given[name])
    fp32 = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")
    for name, tensor in stored_tensors(tmp_path / "out").items():
        wanted = (
            torch.float32 if name.endswith(fp32) else {"keep": given[name].dtype}.get(dtype) or getattr(torch, dtype)
        )
        assert tensor.dtype == wanted, name
        assert torch.equal(tensor, given[name].to(wanted)), name


def test_views_of_one_storage_are_written_each_as_itself(whole, tmp_path):
    reader = CheckpointReader(whole)
    names = [f"{L}0.mlp.gate_proj.weight", f"{L}0.mlp.up_proj.weight"]
    fused = torch.cat([reader.tensor(name) for name in names])
    transposed = reader.tensor(f"{L}0.mlp.down_proj.weight").T.contiguous().T
    assert not transposed.is_contiguous()
    views = dict(zip(names, fused.chunk(2), strict=True)) | {f"{L}0.mlp.down_proj.weight": transposed}
    with CheckpointWriter(tmp_path / "out", reader.architecture) as writer:
        for name in reader.names():
            writer.add(name, views.get(name, reader.tensor(name)))
        fused.zero_()
    for name, tensor in stored_tensors(tmp_path / "out").items():
        assert torch.equal(tensor, reader.tensor(name)), name


def test_vision_and_mtp_are_left_out_as_a_whole(whole, tmp_path):
    path = write(tmp_path / "out", whole, skip=("model.visual.", f"{L}4."))
    reader = CheckpointReader(path)
    reader.check()
    assert not reader.has_vision and not reader.has_mtp
    assert reader.architecture.num_nextn_predict_layers == 0
    assert reader.architecture.vision is not None


@pytest.mark.parametrize(
    "missing",
    [f"{L}3.mlp.experts.5.down_proj.weight", "lm_head.weight", f"{L}4.hnorm.weight", "model.visual.downsample.bias"],
)
def test_tensor_that_was_not_given_is_named_and_nothing_remains(missing, whole, tmp_path):
    with pytest.raises(InputError, match=f"{missing} was not given"):
        write(tmp_path / "out", whole, skip=(missing,))
    assert nothing_but(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (f"{L}0.self_attn.A_log.weight", torch.zeros(2), "is no tensor of this model"),
        ("model.layers.0.self_attn.A_log", torch.zeros(2), "is no tensor of this model"),
        (f"{L}0.mlp.gate_proj.weight_scale_inv", torch.zeros(1, 1), "is no tensor of this model"),
        (f"{L}0.self_attn.A_log", torch.zeros(3), r"has shape \[3\]; needed: \[2\]"),
        (f"{L}0.self_attn.A_log", torch.zeros(2).bfloat16(), "came as bfloat16; needed: float32"),
        (f"{L}0.hc_attn_base", torch.zeros(24).double(), "came as float64; needed: float32"),
        ("lm_head.weight", torch.zeros(64, 64).half(), "came as float16; needed: float32 or bfloat16"),
        ("lm_head.weight", torch.zeros(64, 64, dtype=torch.int8), "came as int8"),
    ],
)
def test_wrong_tensor_is_refused_by_name_and_nothing_remains(name, tensor, named, tmp_path):
    with pytest.raises(InputError, match=named) as error, CheckpointWriter(tmp_path / "out", demo()) as writer:
        writer.add(name, tensor)
    assert name in str(error.value)
    assert nothing_but(tmp_path)


def test_tensor_given_twice_is_refused(tmp_path):
    with pytest.raises(InputError, match="A_log was given twice"), CheckpointWriter(tmp_path / "out", demo()) as writer:
        writer.add(f"{L}0.self_attn.A_log", torch.zeros(2))
        writer.add(f"{L}0.self_attn.A_log", torch.zeros(2))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_interrupted_writing_leaves_nothing(interruption, whole, tmp_path):
    reader = CheckpointReader(whole)
    with (
        pytest.raises(interruption),
        CheckpointWriter(tmp_path / "out", reader.architecture, max_shard_bytes=1) as writer,
    ):
        for name in reader.names()[:9]:
            writer.add(name, reader.tensor(name))
        assert not (tmp_path / "out").exists()
        raise interruption
    assert nothing_but(tmp_path)


def test_killed_writing_leaves_nothing_that_looks_finished(tmp_path):
    code = """
import os, signal, sys
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.checkpoint.synthetic import Initialization, random_tensor
from glm5next_plugin.checkpoint.writing import CheckpointWriter
from glm5next_plugin.recipes.variants import demo
architecture = demo()
with CheckpointWriter(sys.argv[1], architecture, max_shard_bytes=20_000) as writer:
    for name, spec in list(expected_tensors(architecture).items())[:40]:
        writer.add(name, random_tensor(name, spec, architecture, seed=0, init=Initialization()))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")])
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    assert not list(left.glob("*.safetensors")) and not list(left.glob("*.json")) and list(left.iterdir())


def test_full_disk_is_one_error_that_names_the_file(whole, tmp_path, monkeypatch):
    def no_space(tensors, file, metadata):
        raise writing.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(writing, "save_file", no_space)
    with pytest.raises(InputError, match="shard 1 cannot be written to .*shard-1: .*No space left on device"):
        write(tmp_path / "out", whole)
    assert nothing_but(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_full_disk_under_the_index_is_one_error_that_names_the_file(whole, tmp_path, monkeypatch):
    rename = Path.rename

    def rename_and_fill(self, target):
        if self.name.startswith("shard-"):
            (self.parent / INDEX).unlink(missing_ok=True)
            (self.parent / INDEX).symlink_to("/dev/full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_and_fill)
    with pytest.raises(InputError, match="out cannot be written: .*No space left"):
        write(tmp_path / "out", whole)
    assert nothing_but(tmp_path)


def test_occupied_directory_is_refused_and_stays(whole, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InputError, match="exists and is not empty"):
        write(tmp_path / "out", whole)
    assert nothing_but(tmp_path, "out") and nothing_but(tmp_path / "out", "mine")


def test_file_in_the_way_is_refused(whole, tmp_path):
    (tmp_path / "out").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="is a file"):
            write(tmp_path / "out", whole, overwrite=overwrite)


def test_empty_directory_is_taken(whole, tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", whole)
    CheckpointReader(tmp_path / "out").check()


def test_overwriting_replaces_all_of_it_and_only_at_the_end(whole, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00007-of-00009.safetensors").write_text("stale")
    with pytest.raises(InputError):
        write(tmp_path / "out", whole, skip=("lm_head",), overwrite=True)
    assert nothing_but(tmp_path / "out", "model-00007-of-00009.safetensors")
    write(tmp_path / "out", whole, overwrite=True)
    CheckpointReader(tmp_path / "out").check()
    assert nothing_but(tmp_path, "out")


def test_staged_directory_refuses_what_appeared_meanwhile(tmp_path):
    with pytest.raises(InputError, match="not empty"), staged_directory(tmp_path / "out") as staging:
        (staging / "a").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
    assert nothing_but(tmp_path, "out") and nothing_but(tmp_path / "out", "theirs")


def test_parents_are_made(tmp_path):
    with staged_directory(tmp_path / "a" / "b" / "out") as staging:
        (staging / "file").write_text("x")
    assert (tmp_path / "a/b/out/file").read_text() == "x"


def test_wrong_settings_are_refused_before_anything_is_made(tmp_path):
    for settings, named in (
        ({"dtype": "float16"}, "float16"),
        ({"max_shard_bytes": 0}, "max_shard_bytes"),
        ({"companions": tmp_path / "nowhere"}, "nowhere"),
    ):
        with pytest.raises(InputError, match=named):
            CheckpointWriter(tmp_path / "out", demo(), **settings)
    assert nothing_but(tmp_path)
