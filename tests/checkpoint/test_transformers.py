"""transformers and this package read each other's checkpoints."""

import json

import pytest
import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes.variants import tiny

from ..hf_oracle import modeling
from .editing import edited, stored_tensors, write_single_file

KEPT_IN_FP32 = ("conv1d", "A_log", "dt_bias", ".base", ".scale", "e_score_correction_bias")


def load(path, dtype):
    return modeling().Glm5NextForConditionalGeneration.from_pretrained(path, dtype=dtype, output_loading_info=True)


def released_values(path) -> dict[str, torch.Tensor]:
    """fp32 values by released name, with MTP left out."""
    reader = CheckpointReader(path)
    reader.check()
    mtp = f"model.language_model.layers.{reader.architecture.num_hidden_layers}."
    return {name: reader.tensor(name).float() for name in reader.names() if not name.startswith(mtp)}


def assert_same_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def text_and_vision(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", tiny(index_kpool=16), seed=3, vision=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_every_tensor_and_saves_the_same_values(dtype, text_and_vision, tmp_path):
    model, info = load(text_and_vision, dtype)
    assert {key: set(value) for key, value in info.items()} == {
        "missing_keys": set(),
        "unexpected_keys": set(),
        "mismatched_keys": set(),
        "error_msgs": set(),
    }
    assert model.config.text_config.index_kpool == 16
    for name, parameter in model.named_parameters():
        kept = any(kind in name for kind in KEPT_IN_FP32)
        assert parameter.dtype == (torch.float32 if kept else dtype), name
    model.save_pretrained(tmp_path / "saved")
    assert_same_values(released_values(tmp_path / "saved"), released_values(text_and_vision))
    reader = CheckpointReader(tmp_path / "saved")
    assert reader.architecture == CheckpointReader(text_and_vision).architecture
    assert reader.dtype == dtype


def test_transformers_takes_nothing_of_mtp(whole):
    _, info = load(whole, torch.float32)
    assert info["missing_keys"] == set()
    assert info["unexpected_keys"] and all(".layers.4." in name for name in info["unexpected_keys"])


def test_module_names_of_transformers_read_as_the_same_tensors(text_and_vision, tmp_path):
    model, _ = load(text_and_vision, torch.float32)
    state = model.state_dict()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    assert any(name.endswith("self_attn.conv1d.weight") for name in state)
    path = write_single_file(tmp_path / "modules", model.config.to_diff_dict(), state)
    assert CheckpointReader(path).spelling == {"transformers"}
    assert_same_values(released_values(path), released_values(text_and_vision))
    # each stored tensor ends up in the parts, no more and no less
    reader = CheckpointReader(path)
    assert sum(reader.tensor(name).numel() for name in reader.names()) == sum(t.numel() for t in state.values())


def test_merged_tensors_of_the_wrong_size_are_named_as_stored(text_and_vision, tmp_path):
    from glm5next_plugin.errors import InputError

    model, _ = load(text_and_vision, torch.float32)
    layer = "model.language_model.layers.4."
    state = model.state_dict()
    state[layer + "self_attn.conv1d.weight"] = state[layer + "self_attn.conv1d.weight"][:-1]
    state[layer + "mlp.experts.gate_up_proj"] = state[layer + "mlp.experts.gate_up_proj"][:15]
    state[layer + "mlp.experts.down_proj"] = state[layer + "mlp.experts.down_proj"][:, :-1]
    path = write_single_file(tmp_path / "modules", model.config.to_diff_dict(), state)
    with pytest.raises(InputError) as error:
        CheckpointReader(path).check()
    message = str(error.value)
    assert f"{layer}self_attn.conv1d.weight in model.safetensors: shape [767, 1, 4] does not divide into 3" in message
    assert f"{layer}mlp.experts.15.gate_proj.weight is missing" in message
    named = (
        f"{layer}mlp.experts.0.down_proj.weight ({layer}mlp.experts.down_proj in model.safetensors) has shape [255, 64]"
    )
    assert named in message


@pytest.mark.parametrize("spelled", ["released", "transformers"])
def test_text_only_names_read_as_the_same_tensors(spelled, text_and_vision, tmp_path):
    source = text_and_vision
    if spelled == "transformers":
        model, _ = load(text_and_vision, torch.float32)
        source = write_single_file(tmp_path / "modules", model.config.to_diff_dict(), model.state_dict())

    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in stored_tensors(source).items()
        if not name.startswith("model.visual.")
    }
    config = json.loads((source / "config.json").read_text())["text_config"]
    path = write_single_file(tmp_path / "text", config, tensors)
    reader = CheckpointReader(path)
    assert reader.spelling == {"text-only"} | ({"transformers"} if spelled == "transformers" else set())
    assert reader.architecture.vision is None
    text = {
        name: value for name, value in released_values(text_and_vision).items() if not name.startswith("model.visual.")
    }
    assert_same_values(released_values(path), text)


def test_config_that_transformers_saved_without_released_keys_is_read_the_same(text_and_vision, tmp_path):
    from transformers import Glm5NextConfig

    architecture = CheckpointReader(text_and_vision).architecture
    text = Glm5NextConfig(**architecture.released_config()).text_config
    own_keys = {key: getattr(text, key) for key in text.__dataclass_fields__ if key != "dtype"}
    config = Glm5NextConfig(text_config=own_keys, vision_config=architecture.released_config()["vision_config"])
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "linear_attn_config" not in saved and "mhc" not in saved and "indexed_attention" in saved["layer_types"]
    found = Architecture.from_pretrained(tmp_path)
    # a config of transformers has no word for MTP
    assert found == tiny(index_kpool=16, num_nextn_predict_layers=0)


def test_convolutions_that_transformers_kept_in_fp32_equal_the_source_after_casting(text_and_vision, tmp_path):
    model, _ = load(text_and_vision, torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    reader, source = CheckpointReader(tmp_path / "saved"), CheckpointReader(text_and_vision)
    convolutions = [name for name in source.names() if name.endswith("conv1d.weight")]
    assert len(convolutions) == 18
    for name in convolutions:
        assert reader.spec(name).dtype == "F32"
        assert torch.equal(reader.tensor(name).bfloat16(), source.tensor(name))
    assert reader.dtype == torch.bfloat16


def test_edited_copy_loads_as_its_source(whole, tmp_path):
    """The helper of the other tests changes nothing by itself."""
    assert_same_values(released_values(edited(whole, tmp_path / "edited")), released_values(whole))
