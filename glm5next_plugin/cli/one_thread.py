"""Commands whose work is done by worker processes."""

from __future__ import annotations

import os


def keep_to_one_thread() -> None:
    """Leave the cores to the workers, and this process in a state in which it can be forked.

    To be called before numpy and torch are imported: they start their threads when they are.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
