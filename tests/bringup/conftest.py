"""Workers that start fast."""

import multiprocessing

import pytest

from glm5next_plugin.bringup import process


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers are forks of one process that has imported both sides; spawned ones would take half a minute each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bringup.preloaded"])
    monkeypatch.setattr(process, "_CONTEXT", context)
