"""Config classes for a transformers that does not know the model, in a process where its own are taken away."""

import json
import subprocess
import sys

import pytest

from glm5next_plugin.recipes.variants import tiny

FORGET = """
import json, sys
from transformers.models.auto import configuration_auto
for model_type in ("glm5_next", "glm5_next_text", "glm5_next_vision"):
    configuration_auto.CONFIG_MAPPING_NAMES.pop(model_type, None)
    configuration_auto.CONFIG_MAPPING._mapping.pop(model_type, None)
from transformers import AutoConfig
"""


def run(code: str, *arguments: object) -> dict:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    """What one process without transformers' own classes finds."""
    path = tmp_path_factory.mktemp("config")
    (path / "config.json").write_text(json.dumps(tiny().released_config()))
    code = """
answers = {}
try:
    AutoConfig.from_pretrained(sys.argv[1])
except ValueError as error:
    answers["before"] = str(error)
from glm5next_plugin.architecture import Architecture
from glm5next_plugin.hf_config import Glm5NextConfig, Glm5NextTextConfig, register_hf_config
answers["registered"] = [register_hf_config(), register_hf_config()]
config = AutoConfig.from_pretrained(sys.argv[1])
answers["class"] = type(config).__module__
answers["levels"] = [type(config.text_config).__name__, type(config.vision_config).__name__]
answers["numbers"] = [config.text_config.linear_attn_config["num_heads"], config.text_config.mhc,
                      config.text_config.index_kpool, config.text_config.num_local_experts, config.vision_config.depth,
                      config.text_config.head_dim, config.get_text_config().hidden_size, config.image_token_id]
written = Architecture.from_pretrained(sys.argv[1])
answers["architecture"] = Architecture.from_config(config) == written
config.save_pretrained(sys.argv[1] + "/saved")
answers["saved"] = Architecture.from_pretrained(sys.argv[1] + "/saved") == written
answers["read again"] = Architecture.from_config(AutoConfig.from_pretrained(sys.argv[1] + "/saved")) == written
flat = Glm5NextConfig(**written.released_config()["text_config"])
answers["text-only"] = [flat.text_config.num_hidden_layers, flat.vision_config]
text = AutoConfig.for_model(**written.released_config()["text_config"])
answers["text alone"] = [type(text).__name__, text.hidden_size]
answers["shown"] = "linear_attn_config" in repr(config)
try:
    Glm5NextConfig(text_config={**written.released_config()["text_config"], "mhc": False})
except ValueError as error:
    answers["refused"] = str(error)
print(json.dumps(answers))
"""
    return run(FORGET + code, path)


def test_without_registering_the_model_is_unknown(answers):
    assert "glm5_next" in answers["before"]


def test_registering_twice_is_registering_once(answers):
    assert answers["registered"] == [True, True]


def test_auto_config_gives_the_released_keys_at_their_levels(answers):
    assert answers["class"] == "glm5next_plugin.hf_config"
    assert answers["levels"] == ["Glm5NextTextConfig", "Glm5NextVisionConfig"]
    assert answers["numbers"] == [4, True, 4, 16, 1, 0, 256, 511 - 1]


def test_config_object_saved_and_read_is_the_same_architecture(answers):
    assert answers["architecture"] and answers["saved"] and answers["read again"] and answers["shown"]


def test_text_only_config_has_no_vision_tower(answers):
    assert answers["text-only"] == [8, None]
    assert answers["text alone"] == ["Glm5NextTextConfig", 256]


def test_config_that_is_not_the_model_is_refused_by_field(answers):
    assert "'mhc'" in answers["refused"]


def test_classes_of_a_transformers_that_knows_the_model_are_kept():
    from transformers import CONFIG_MAPPING

    from glm5next_plugin.hf_config import register_hf_config

    assert not register_hf_config()
    assert CONFIG_MAPPING["glm5_next"].__module__ == "transformers.models.glm5_next.configuration_glm5_next"
