"""Tests that need a CUDA device; the header of their log names commit and card."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items):
    """Skip this folder on machines without a device."""
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_report_header():
    """Commit (``GLM5NEXT_COMMIT`` where the tree is no clone), card and versions."""
    if not torch.cuda.is_available():
        return None
    commit = os.environ.get("GLM5NEXT_COMMIT")
    if commit is None:
        git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = git.stdout.strip() or "unknown"
    return [f"commit {commit}", f"card {torch.cuda.get_device_name()}, torch {torch.__version__}"]
