"""Distributed checkpoints: what the command writes is what Megatron saves, and loads as that does, in every layout."""

import dataclasses
import json
import pickle

import pytest
import torch

from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.checkpoint.writing import CheckpointWriter
from glm5next_plugin.recipes import variants
from tests import hf_oracle
from tests.command import run_convert, run_glm5next

from .conftest import INITIALIZATION
from .process_pool import Layout
from .test_hf_parity import tokens

LOAD = "tests.megatron.module_runs:logits_from_torch_dist"
LOAD_BY_BRIDGE = "tests.megatron.module_runs:logits_from_megatron_bridge"
SAVE = "tests.megatron.module_runs:save_torch_dist"
FOUR = Layout(tp=2, pp=2, world=4)


@pytest.fixture(scope="module")
def saved(pool, checkpoints, tmp_path_factory):
    """``saved(layout)``: what Megatron saves in a layout after it imported the checkpoint."""
    made = {}

    def save(layout):
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("torch_dist")
            pool.run(SAVE, layout, checkpoint=str(checkpoints(4)), weights=str(made[layout]))
        return made[layout]

    return save


@pytest.fixture(scope="module")
def written(checkpoints, tmp_path_factory):
    """What the command writes of the same checkpoint."""
    target = tmp_path_factory.mktemp("written") / "torch_dist"
    run_convert(checkpoints(4), target, "--verify").check_returncode()
    return target


@pytest.fixture(scope="module")
def imported(pool, checkpoints):
    """Tokens, and their logits after Megatron-Bridge imported the released checkpoint."""
    batch = tokens(34, seed=8)
    (answer,) = pool.run(
        "tests.megatron.layout_runs:forward_backward",
        Layout(),
        checkpoint=str(checkpoints(4)),
        batches=[batch],
        backward=False,
    )
    return batch, answer["logits"][0]


def require_equal(answers, expected):
    answers = [logits for logits in answers if logits is not None]
    assert answers
    for logits in answers:
        assert (logits - expected).abs().max() / expected.abs().max() <= 1e-5


@pytest.mark.parametrize("layout", [Layout(tp=2, world=2), Layout(pp=2, world=2), Layout(ep=2, world=2)], ids=str)
def test_what_one_process_saved_loads_in_other_layouts(pool, checkpoints, saved, imported, layout):
    batch, expected = imported
    weights = str(saved(Layout()))
    require_equal(pool.run(LOAD, layout, checkpoint=str(checkpoints(4)), weights=weights, tokens=batch), expected)


@pytest.mark.parametrize("layout", [Layout(), FOUR], ids=str)
def test_what_the_command_wrote_gives_the_logits_of_an_import(pool, checkpoints, written, imported, layout):
    batch, expected = imported
    weights = str(written / "release")
    require_equal(pool.run(LOAD, layout, checkpoint=str(checkpoints(4)), weights=weights, tokens=batch), expected)


@pytest.mark.parametrize("layout", [Layout(), FOUR], ids=str)
def test_megatron_bridge_builds_and_loads_what_the_command_wrote(pool, written, imported, layout):
    batch, expected = imported
    require_equal(pool.run(LOAD_BY_BRIDGE, layout, weights=str(written / "release"), tokens=batch), expected)


# ---------------------------------------------------------------------- the format
def metadata_of(directory):
    """Shapes and dtypes of the tensors, and the keys of the objects, as torch itself reads them."""
    with (directory / ".metadata").open("rb") as stream:
        described = pickle.load(stream).state_dict_metadata
    tensors = {k: (tuple(v.size), v.properties.dtype) for k, v in described.items() if hasattr(v, "size")}
    return tensors, described.keys() - tensors.keys()


def test_the_command_writes_the_keys_that_megatron_saves(saved, written):
    ours, theirs = metadata_of(written / "release"), metadata_of(saved(Layout()))
    assert ours == theirs
    assert len(ours[0]) > 200 and len(ours[1]) > 100


def test_the_common_state_is_that_of_a_save(saved, written):
    from megatron.core.dist_checkpointing import load_common_state_dict

    ours, theirs = load_common_state_dict(str(written / "release")), load_common_state_dict(str(saved(Layout())))
    assert ours == theirs == {"checkpoint_version": 3.0, "iteration": 0}


@pytest.mark.parametrize("layout", [Layout(), FOUR, Layout(ep=2, world=2)], ids=str)
def test_what_megatron_saved_is_read_in_whatever_chunks_it_has(checkpoints, saved, layout, tmp_path):
    weights = saved(layout)
    assert run_glm5next("verify", checkpoints(4), weights, "--base", checkpoints(4)).returncode == 0
    run_convert(weights, tmp_path / "back", "--base", checkpoints(4), "--verify").check_returncode()
    before, after = CheckpointReader(checkpoints(4)), CheckpointReader(tmp_path / "back")
    assert before.names() == after.names()
    for name in before.names():
        assert torch.equal(before.tensor(name), after.tensor(name)), name


def test_what_megatron_saved_needs_the_checkpoint_that_it_came_from(saved, tmp_path):
    result = run_convert(saved(Layout()), tmp_path / "back")
    assert result.returncode == 2 and "--base" in result.stderr and len(result.stderr.splitlines()) == 1


def test_rows_that_a_framework_added_to_the_vocabulary_are_left_out(checkpoints, saved, tmp_path):
    whole = CheckpointReader(checkpoints(4))
    smaller = dataclasses.replace(whole.architecture, vocab_size=122)
    with CheckpointWriter(tmp_path / "base", smaller, dtype="float32") as writer:
        for name in whole.names():
            rows = 122 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else None
            writer.add(name, whole.tensor(name)[:rows])
    run_convert(saved(Layout()), tmp_path / "back", "--base", tmp_path / "base").check_returncode()
    assert run_glm5next("verify", tmp_path / "base", tmp_path / "back").returncode == 0


# ---------------------------------------------------------------------- there and back
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
    assert sum(name.startswith("model.visual.") for name in after.names()) > 0
    assert sum(".layers.8." in name for name in after.names()) > 0
    for name in before.names():
        old, new = before.tensor(name), after.tensor(name)
        assert old.dtype == new.dtype and torch.equal(old, new), name


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
