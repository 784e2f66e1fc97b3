"""Fixtures of the operator tests."""

import pytest
import torch

from tests import hf_oracle


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def hf():
    """The modeling module of transformers, in torch code of its own."""
    return hf_oracle.modeling()


@pytest.fixture(scope="session")
def hf_config():
    """A small text config of transformers; keyword arguments go first."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    def make(**changes):
        sizes = dict(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=64,
            moe_intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=3,
            qk_head_dim=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=0,
            v_head_dim=12,
            q_lora_rank=32,
            kv_lora_rank=20,
            index_n_heads=4,
            index_head_dim=16,
            index_kpool=4,
            index_topk=16,
            linear_num_heads=2,
            linear_head_dim=8,
            n_routed_experts=16,
            num_experts_per_tok=4,
            pad_token_id=0,
        )
        config = Glm5NextTextConfig(**{**sizes, **changes})
        config._attn_implementation = config._experts_implementation = "eager"
        return config

    return make
