"""Environment of every test, set before anything imports torch; processes that tests start inherit it."""

import os
import signal

# The ranks of the layout tests share few cores: one thread a process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# megatron-core compiles small functions at first use; on a CPU that costs minutes and proves nothing.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# A shell that starts the tests in the background has interrupts ignored, which the tests of Ctrl-C would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
