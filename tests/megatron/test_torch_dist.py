"""Distributed checkpoints: saved on one process, loaded in other layouts; released format there and back."""

import json

import pytest
import torch

from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants
from tests import hf_oracle

from .command import run_convert
from .conftest import INITIALIZATION
from .process_pool import Layout
from .test_hf_parity import tokens

LOAD = "tests.megatron.module_runs:logits_from_torch_dist"


@pytest.fixture(scope="module")
def saved(pool, checkpoints, tmp_path_factory):
    weights = tmp_path_factory.mktemp("torch_dist")
    pool.run(
        "tests.megatron.module_runs:save_torch_dist", Layout(), checkpoint=str(checkpoints(4)), weights=str(weights)
    )
    return weights


@pytest.mark.parametrize("layout", [Layout(tp=2, world=2), Layout(pp=2, world=2), Layout(ep=2, world=2)], ids=str)
def test_what_one_process_saved_loads_in_other_layouts(pool, checkpoints, saved, layout):
    batch = tokens(34, seed=8)
    arguments = dict(checkpoint=str(checkpoints(4)), weights=str(saved), tokens=batch)
    (expected,) = pool.run(LOAD, Layout(), **arguments)
    answers = [logits for logits in pool.run(LOAD, layout, **arguments) if logits is not None]
    assert answers
    for logits in answers:
        assert (logits - expected).abs().max() / expected.abs().max() <= 1e-5


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    architecture = variants.tiny(vocab_size=128)
    path = tmp_path_factory.mktemp("released") / "source"
    return make_checkpoint(
        path, architecture, seed=6, vision=True, mtp=True, init=INITIALIZATION, max_shard_bytes=4 * 1024**2
    )


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """The source through the real command: to torch_dist and back."""
    folder = tmp_path_factory.mktemp("converted")
    for arguments in ([source, folder / "torch_dist"], [folder / "torch_dist", folder / "released"]):
        run_convert(*arguments).check_returncode()
    return folder


def test_released_to_torch_dist_and_back_is_bit_identical(source, converted):
    before, after = CheckpointReader(source), CheckpointReader(converted / "released")
    after.check()
    assert before.names() == after.names()
    # 371 names in Megatron, as HF counts them on disk: see the class counts of tests/checkpoint
    assert sum(name.startswith("model.visual.") for name in after.names()) > 0
    assert sum(".layers.8." in name for name in after.names()) > 0
    for name in before.names():
        old, new = before.tensor(name), after.tensor(name)
        assert old.dtype == new.dtype and torch.equal(old, new), name


def test_index_and_files_of_an_export_agree(converted):
    from safetensors import safe_open

    folder = converted / "released"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    on_disk = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            on_disk.update(dict.fromkeys(tensors.keys(), file.name))
    assert on_disk == index


def test_an_export_brings_config_and_tokenizer(source, converted):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (converted / "released" / name).is_file(), name
    assert json.loads((converted / "released" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_a_checkpoint_saved_by_transformers_imports_to_the_same_weights(source, tmp_path):
    model = hf_oracle.modeling().Glm5NextForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    run_convert(tmp_path / "saved", tmp_path / "torch_dist").check_returncode()
    run_convert(tmp_path / "torch_dist", tmp_path / "back").check_returncode()
    before, after = CheckpointReader(source), CheckpointReader(tmp_path / "back")
    for name in after.names():
        assert torch.equal(before.tensor(name), after.tensor(name)), name
    assert set(before.names()) - set(after.names()) == {name for name in before.names() if ".layers.8." in name}


def test_a_bad_source_is_one_line_exit_code_2_and_no_output(source, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in source.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    result = run_convert(broken, tmp_path / "out")
    assert result.returncode == 2 and shard.name in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_an_occupied_target_is_refused(source, converted):
    result = run_convert(source, converted / "released")
    assert result.returncode == 2 and "not empty" in result.stderr
