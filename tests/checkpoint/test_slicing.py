"""Slices of a checkpoint with the 45 layers of the release: layer by layer the tensors of the source."""

import json

import pytest
import torch

from glm5next_plugin.adapters.megatron.convert import convert
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants

from ..command import run_glm5next
from ..hf_oracle import modeling
from .editing import INDEX, stored_tensors

LAYERS = "model.language_model.layers."
# kept layers -> (layer_types, mlp_layer_types) by the first letter, and first_k_dense_replace, by hand:
# of 0 to 44 those with 3, 7, 11, ... are DSA and 0, 1, 2 dense
SLICES = {
    "8layer": (range(8), "lllDlllD", "dddsssss", 3),
    "0-7": (range(8), "lllDlllD", "dddsssss", 3),
    "4layer": ((0, 4, 5, 7), "lllD", "dsss", 1),
    "0,4,5,7": ((0, 4, 5, 7), "lllD", "dsss", 1),
    "43-44": ((43, 44), "Dl", "ss", 0),
    "1, 3-4,11": ((1, 3, 4, 11), "lDlD", "dsss", 1),
    "2": ((2,), "l", "d", 1),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """45 layers of small width, with vision and MTP, in many shards."""
    architecture = variants.demo(num_hidden_layers=45, first_k_dense_replace=3)
    path = tmp_path_factory.mktemp("release") / "checkpoint"
    return make_checkpoint(path, architecture, seed=9, vision=True, mtp=True, max_shard_bytes=3_000_000)


def original(name, kept):
    """Name in the source of a tensor of the slice."""
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{kept[int(number)]}.{rest}"


@pytest.mark.parametrize("layers", SLICES)
def test_slice_has_the_tensors_of_its_layers_and_a_config_that_says_so(layers, source, tmp_path):
    kept, attention, mlp, dense = SLICES[layers]
    target = tmp_path / "slice"
    result = run_glm5next("slice", source, target, "--layers", layers, "--verify")
    assert result.returncode == 0, result.stderr

    before, after = stored_tensors(source), stored_tensors(target)
    belongs = {original(name, kept): tensor for name, tensor in after.items()}
    assert len(belongs) == len(after)
    wanted = {
        name for name in before if not name.startswith(LAYERS) or int(name.removeprefix(LAYERS).split(".")[0]) in kept
    }
    assert belongs.keys() == wanted
    for name, tensor in belongs.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    assert set(json.loads((target / INDEX).read_text())["weight_map"]) == set(after)

    text = json.loads((target / "config.json").read_text())["text_config"]
    assert text["num_hidden_layers"] == len(kept) and text["num_nextn_predict_layers"] == 0
    kinds = {"l": "linear_attention", "D": "deepseek_sparse_attention", "d": "dense", "s": "sparse"}
    assert text["layer_types"] == [kinds[letter] for letter in attention]
    assert text["mlp_layer_types"] == [kinds[letter] for letter in mlp]
    assert text["indexer_types"] == ["full"] * len(kept)
    assert text["first_k_dense_replace"] == dense
    linear = text["linear_attn_config"]
    assert linear["kda_layers"] == [i for i, letter in enumerate(attention) if letter == "l"]
    assert linear["full_attn_layers"] == [i for i, letter in enumerate(attention) if letter == "D"]
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert run_glm5next("inspect", target).returncode == 0


@pytest.mark.parametrize("layers", ["8layer", "4layer"])
def test_transformers_loads_a_slice_whole(layers, source, tmp_path):
    run_glm5next("slice", source, tmp_path / "slice", "--layers", layers).check_returncode()
    model, info = modeling().Glm5NextForConditionalGeneration.from_pretrained(
        tmp_path / "slice", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert len(model.model.language_model.layers) == int(layers[0])


def test_mtp_layers_follow_the_last_layer_on_request(source, tmp_path):
    run_glm5next("slice", source, tmp_path / "slice", "--layers", "4layer", "--mtp", "--verify").check_returncode()
    before, after = stored_tensors(source), stored_tensors(tmp_path / "slice")
    mtp = [name for name in before if name.startswith(LAYERS + "45.")]
    assert len(mtp) > 40
    for name in mtp:
        assert torch.equal(after[name.replace(".45.", ".4.")], before[name])
    reader = CheckpointReader(tmp_path / "slice")
    reader.check()
    assert reader.has_mtp and reader.architecture.num_nextn_predict_layers == 1


def test_fp8_and_its_scales_stay_as_they_are(source, tmp_path):
    convert(source, tmp_path / "fp8", to="released", fp8=True)
    run_glm5next("slice", tmp_path / "fp8", tmp_path / "slice", "--layers", "4layer", "--verify").check_returncode()
    before, after = stored_tensors(tmp_path / "fp8"), stored_tensors(tmp_path / "slice")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in after.values()) == 3 + 4 + 3 * 3 * (8 + 1)
    for name, tensor in after.items():
        expected = before[original(name, (0, 4, 5, 7))]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), name
    kept = json.loads((tmp_path / "slice" / "config.json").read_text())["quantization_config"]
    assert kept["weight_block_size"] == [128, 128]
    assert f"{LAYERS}3.self_attn.kv_b_proj" in kept["modules_to_not_convert"]
    assert not any(".layers.4." in name or ".layers.7." in name for name in kept["modules_to_not_convert"])


def test_a_torch_dist_directory_is_sliced_to_the_same(source, tmp_path):
    convert(source, tmp_path / "dist")
    for whole, part in [(tmp_path / "dist", "of_dist"), (source, "of_released")]:
        run_glm5next("slice", whole, tmp_path / part, "--layers", "4layer").check_returncode()
    assert run_glm5next("verify", tmp_path / "of_released", tmp_path / "of_dist").returncode == 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("0-45", "the model has the layers 0 to 44, not [45]"),
        ("7-3", "the model has the layers 0 to 44"),
        ("4,0", "they must ascend, each once"),
        ("0,0-1", "they must ascend, each once"),
        ("", "needed: 8layer or 4layer, or numbers and runs, as 0-7 or 0,4,5,7"),
        ("all", "needed: 8layer or 4layer, or numbers and runs, as 0-7 or 0,4,5,7"),
        ("-1", "needed: 8layer or 4layer"),
        ("0-99999999999", "needed: 8layer or 4layer"),
    ],
)
def test_layers_that_cannot_be_are_refused(layers, message, source, tmp_path):
    result = run_glm5next("slice", source, tmp_path / "slice", f"--layers={layers}")
    assert result.returncode == 2 and message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_preset_that_the_model_has_not_is_refused(whole, tmp_path):
    for preset, message in [("8layer", "not [4, 5, 6, 7]"), ("4layer", "lacks a dense KDA layer, then two MoE KDA")]:
        ours = whole
        if preset == "4layer":
            ours = make_checkpoint(tmp_path / "sparse", variants.demo(num_hidden_layers=3), tokenizer=False)
        result = run_glm5next("slice", ours, tmp_path / "slice", "--layers", preset)
        assert result.returncode == 2 and message in " ".join(result.stderr.split()), result.stderr
        assert not (tmp_path / "slice").exists()


def test_mtp_that_is_not_there_is_refused(tmp_path):
    source = make_checkpoint(tmp_path / "text", "demo", tokenizer=False)
    result = run_glm5next("slice", source, tmp_path / "slice", "--layers", "0-3", "--mtp")
    assert result.returncode == 2 and "no MTP tensors to keep" in " ".join(result.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]
