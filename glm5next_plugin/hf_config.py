"""Config classes of ``glm5_next`` for a transformers that does not know the model (5.8 to 5.16).

Imports transformers, so it is imported by entry points and by nothing else in this package.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from glm5next_plugin.architecture import Architecture


class Glm5NextTextConfig(PreTrainedConfig):
    """The text level, with the keys of the released spelling as attributes.

    ``layer_types`` says ``full_attention`` where this transformers refuses the released word for DSA.
    """

    model_type = "glm5_next_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_local_experts": "n_routed_experts"}

    def __init__(self, **kwargs: Any):
        if kwargs.get("layer_types") is not None:
            kwargs["layer_types"] = [
                kind if kind in ALLOWED_LAYER_TYPES else "full_attention" for kind in kwargs["layer_types"]
            ]
        super().__init__(**kwargs)


class Glm5NextVisionConfig(PreTrainedConfig):
    """The vision tower, with the keys of the released spelling as attributes."""

    model_type = "glm5_next_vision"
    base_config_key = "vision_config"
    attribute_map = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)


class Glm5NextConfig(PreTrainedConfig):
    """The whole config: validated, and in the full released spelling whatever the file's spelling was.

    Without arguments it is empty, which transformers asks of every config class.

    Raises:
        ConfigError: a config that is not this model; names the field.
    """

    model_type = "glm5_next"
    sub_configs = {"text_config": Glm5NextTextConfig, "vision_config": Glm5NextVisionConfig}
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, text_config: Any = None, vision_config: Any = None, **kwargs: Any):
        if text_config is not None or "num_hidden_layers" in kwargs:
            levels = {"text_config": text_config, "vision_config": vision_config}
            given = {"model_type": self.model_type, **levels, **kwargs}
            kwargs = Architecture.from_config(given).released_config()
            text_config, vision_config = kwargs.pop("text_config"), kwargs.pop("vision_config", None)
            kwargs.pop("model_type")
        without_vision = text_config is not None and vision_config is None
        self.text_config = Glm5NextTextConfig(**(text_config or {}))
        self.vision_config = None if without_vision else Glm5NextVisionConfig(**(vision_config or {}))
        super().__init__(**kwargs)


def register_hf_config() -> bool:
    """Tell AutoConfig of the classes above, unless it knows the model already.

    Returns:
        whether the classes above are the ones that AutoConfig uses.
    """
    for config_class in (Glm5NextConfig, Glm5NextTextConfig, Glm5NextVisionConfig):
        if config_class.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config_class.model_type, config_class)
    return CONFIG_MAPPING[Glm5NextConfig.model_type] is Glm5NextConfig
