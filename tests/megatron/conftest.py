"""Checkpoints and processes that the tests of this folder share."""

from pathlib import Path

import pytest

from glm5next_plugin.checkpoint.synthetic import Initialization, make_checkpoint
from glm5next_plugin.recipes import variants

from .process_pool import ProcessPool

# strong enough that decays, clamps, mixes and choices differ from token to token, and 16 index heads, so that no two
# pools tie at a score of exactly zero
INITIALIZATION = Initialization(norm_std=0.2, hc_base_std=0.3, a_log_std=0.5, expert_bias_mean=7.0, expert_bias_std=0.1)


@pytest.fixture(scope="session")
def pool():
    """Ranks of parallel layouts, forked from one process that imports Megatron."""
    return ProcessPool()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """``checkpoints(kpool)``: a tiny fp32 checkpoint with this pool size."""
    made: dict[int, Path] = {}

    def checkpoint(kpool: int) -> Path:
        if kpool not in made:
            topk = {4: 16, 16: 32}[kpool]
            architecture = variants.tiny(vocab_size=128, index_n_heads=16, index_kpool=kpool, index_topk=topk)
            path = tmp_path_factory.mktemp("tiny") / f"kpool{kpool}"
            made[kpool] = make_checkpoint(path, architecture, seed=3, dtype="float32", init=INITIALIZATION)
        return made[kpool]

    return checkpoint


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """A small fp32 checkpoint with the release's 45 layers: DSA every fourth and last, the first three dense."""
    architecture = variants.tiny(
        num_hidden_layers=45,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=2,
        qk_head_dim=16,
        v_head_dim=16,
        q_lora_rank=32,
        kv_lora_rank=32,
        index_n_heads=16,
        n_routed_experts=8,
        linear_attn_config=dict(num_heads=2, head_dim=16),
    )
    path = tmp_path_factory.mktemp("deep") / "checkpoint"
    return make_checkpoint(path, architecture, seed=4, dtype="float32", init=INITIALIZATION)
