"""What the forked workers of the tests have imported already: transformers' model without fla, and the trainer."""

import sys

sys.modules["fla"] = None

import transformers.models.glm5_next.modeling_glm5_next  # noqa: E402, F401

from glm5next_plugin.adapters.megatron import registration  # noqa: E402

from . import stand_ins  # noqa: E402, F401

registration.register()

import glm5next_plugin.adapters.megatron.bringup_trainer  # noqa: E402, F401
