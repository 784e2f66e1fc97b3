from pathlib import Path

import pytest

from glm5next_plugin.checkpoint.synthetic import make_checkpoint


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """The demo model with vision and MTP, in several shards."""
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    return make_checkpoint(path, "demo", seed=1, vision=True, mtp=True, max_shard_bytes=300_000)
