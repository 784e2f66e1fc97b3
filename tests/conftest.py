"""Environment of every test, set before anything imports torch; processes that tests start inherit it."""

import os

# The workers of pytest-xdist and the ranks of the layout tests share few cores: one thread a process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# megatron-core compiles small functions at first use; on a CPU that costs minutes and proves nothing.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
