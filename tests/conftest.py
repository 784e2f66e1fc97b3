"""Environment of every test, set before anything imports torch; processes that tests start inherit it."""

import os

# The workers of pytest-xdist and the ranks of the layout tests share few cores: one thread a process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# megatron-core compiles small functions at first use; on a CPU that costs minutes and proves nothing.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

_HERE = Path(__file__).parent
# folders whose tests share one pool of processes that import Megatron once
_SHARE_PROCESSES = ("megatron", "bringup")


def pytest_collection_modifyitems(items):
    """Keep the tests of a file, and all that share processes, in one worker of pytest-xdist."""
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        item.add_marker(pytest.mark.xdist_group("processes" if folder in _SHARE_PROCESSES else str(item.path)))
