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
    """Four processes that import Megatron once."""
    pool = ProcessPool(4)
    yield pool
    pool.close()


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
