"""What an export writes: FP8 where the release has it, an index that is its files, weights that transformers loads."""

import json

import pytest
import torch
from safetensors import safe_open

from glm5next_plugin.adapters.megatron.convert import convert
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants

from ..command import run_convert, run_glm5next
from ..hf_oracle import modeling
from .editing import INDEX, edited, stored_tensors

# of the tiny model: KDA at 0, 1, 2, 4, 5, 6; DSA at 3, 7 and in the MTP layer 8; dense MLP at 0, 1, 2
DSA_LAYERS, DENSE_LAYERS = (3, 7, 8), (0, 1, 2)
# what is FP8 below a layer, from the column "dtype" of the released table
DSA_FP8 = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
MLP_FP8 = ("gate_proj", "up_proj", "down_proj")
FP32 = (".A_log", ".dt_bias", "_base", "_scale", ".e_score_correction_bias", "_scale_inv")


def policy() -> set[str]:
    layers = "model.language_model.layers"
    names = {f"{layers}.{n}.self_attn.{module}.weight" for n in DSA_LAYERS for module in DSA_FP8}
    for n in range(9):
        places = ["mlp"] if n in DENSE_LAYERS else ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(16))]
        names |= {f"{layers}.{n}.{place}.{module}.weight" for place in places for module in MLP_FP8}
    return names


def headers(directory):
    """Dtype by stored name, per file, as safetensors reads them."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            found[file.name] = {name: stream.get_slice(name).get_dtype() for name in stream.keys()}
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    return make_checkpoint(path, variants.tiny(), seed=4, vision=True, mtp=True)


@pytest.fixture(scope="module")
def quantised(source, tmp_path_factory):
    """The FP8 export that the command makes."""
    path = tmp_path_factory.mktemp("fp8") / "checkpoint"
    shards = ("--max-shard-size", "0.002")
    run_convert(source, path, "--to", "released", "--fp8", "--verify", *shards).check_returncode()
    return path


# ---------------------------------------------------------------------- FP8
def test_fp8_follows_the_table_tensor_by_tensor(quantised):
    stored = {name: dtype for file in headers(quantised).values() for name, dtype in file.items()}
    assert {name for name, dtype in stored.items() if dtype == "F8_E4M3"} == policy()
    assert {name for name in stored if name.endswith("_scale_inv")} == {f"{name}_scale_inv" for name in policy()}
    for name, dtype in stored.items():
        if name not in policy():
            assert dtype == ("F32" if name.endswith(FP32) else "BF16"), name


def test_scale_is_multiplied_and_has_a_block_of_its_own_for_each_ragged_edge(source, quantised):
    before, after = stored_tensors(source), stored_tensors(quantised)
    for name in policy():
        matrix, weight, scale = before[name].float(), after[name].float(), after[name + "_scale_inv"]
        assert scale.shape == (-(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128))
        for i, j in [(0, 0), (scale.shape[0] - 1, scale.shape[1] - 1)]:
            block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            assert weight[block].abs().max() == 448
            error = (weight[block] * scale[i, j] - matrix[block]).abs().max()
            assert error <= matrix[block].abs().max() * 2**-4
            assert torch.isclose(scale[i, j], matrix[block].abs().max() / 448, rtol=1e-6)


def test_fp8_of_the_source_is_copied_byte_for_byte(quantised, tmp_path):
    run_convert(quantised, tmp_path / "again", "--to", "released", "--fp8", "--verify").check_returncode()
    before, after = stored_tensors(quantised), stored_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("command", ["convert", "slice"])
def test_a_nan_among_fp8_codes_is_not_copied(command, quantised, tmp_path):
    name = sorted(policy())[-1]

    def spoil(tensors):
        tensors[name].view(torch.uint8)[-1, -1] = 0xFF

    source = edited(quantised, tmp_path / "source", spoil)
    options = ["--to", "released", "--fp8"] if command == "convert" else ["--layers", "0-7", "--mtp"]
    result = run_glm5next(command, source, tmp_path / "target", *options)
    assert result.returncode == 2
    assert name in result.stderr and "model.safetensors" in result.stderr and "1 value" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_fp8_through_torch_dist_is_the_dequantised_checkpoint(quantised, tmp_path):
    """A second export differs from the first by nothing but what it quantises: a block's largest is 448 already."""
    run_convert(quantised, tmp_path / "dist", "--verify").check_returncode()
    run_convert(tmp_path / "dist", tmp_path / "bf16", "--verify").check_returncode()
    assert run_glm5next("verify", quantised, tmp_path / "bf16").returncode == 0
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    dequantised, stored = stored_tensors(tmp_path / "bf16"), stored_tensors(quantised)
    assert dequantised.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name in policy():
        scale = stored[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = stored[name].float()
        expected = weight * scale[: weight.shape[0], : weight.shape[1]]
        assert torch.equal(dequantised[name], expected.bfloat16()), name


def test_transformers_loads_fp8_as_the_weights_that_we_dequantise(quantised, tmp_path):
    run_convert(quantised, tmp_path / "bf16", "--to", "released").check_returncode()
    models = []
    for path in (quantised, tmp_path / "bf16"):
        model, info = modeling().Glm5NextForConditionalGeneration.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["mismatched_keys"]
        assert info["unexpected_keys"] and all(".layers.8." in name for name in info["unexpected_keys"])
        models.append(model.eval())
    for name, parameter in models[1].named_parameters():
        if "conv1d" in name:  # transformers keeps these in fp32, but not in a checkpoint with FP8
            parameter.data = parameter.data.bfloat16()
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype and torch.equal(tensor, states[1][name]), name
    ids = torch.randint(0, 500, (1, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in models]
    assert torch.equal(*logits) and logits[0].float().std() > 0.01


# ---------------------------------------------------------------------- the index
def without(names):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if names in name]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("limit", [1, 40_000, 3_000_000, 10**10], ids=lambda limit: f"{limit}B")
@pytest.mark.parametrize("dropped", ["nothing", ".layers.4.", "model.visual."], ids=["whole", "no-mtp", "no-vision"])
def test_the_index_is_the_files_both_ways(whole, dropped, limit, fp8, tmp_path):
    source = whole if dropped == "nothing" else edited(whole, tmp_path / "source", without(dropped))
    target = tmp_path / "target"
    convert(source, target, to="released", fp8=fp8, max_shard_bytes=limit)
    index = json.loads((target / INDEX).read_text())
    files = headers(target)
    assert {name: file for file, names in files.items() for name in names} == index["weight_map"]
    assert all(files.values())
    numbers = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert list(files) == numbers
    stored = stored_tensors(target)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())
    assert {name for name in stored if not name.endswith("_scale_inv")} == set(stored_tensors(source))
    text = json.loads((target / "config.json").read_text())["text_config"]
    assert text["num_nextn_predict_layers"] == (0 if dropped == ".layers.4." else 1)
    written = CheckpointReader(target)
    written.check()
    assert set(written.names()) == set(stored_tensors(source))


def test_a_weight_and_its_scale_share_a_file_at_any_shard_size(whole, tmp_path):
    convert(whole, tmp_path / "target", to="released", fp8=True, max_shard_bytes=1)
    index = json.loads((tmp_path / "target" / INDEX).read_text())["weight_map"]
    scales = [name for name in index if name.endswith("_scale_inv")]
    assert len(scales) > 50
    assert all(index[name] == index[name.removesuffix("_scale_inv")] for name in scales)
