"""Processes that run one parallel layout after another over gloo, forked from one that imports Megatron once."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import pickle
import queue
import tempfile
import traceback
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """Parallel sizes of one run; ``world`` processes take part."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    world: int = 1
    provider: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        extra = "".join(f"-{name}={value}" for name, value in (*self.provider, *self.ddp))
        cp = f"-cp{self.cp}" if self.cp > 1 else ""
        return f"tp{self.tp}-pp{self.pp}-ep{self.ep}{cp}-world{self.world}{extra}"


class ProcessPool:
    """One process imports Megatron; :meth:`run` forks the ranks of a layout from it.

    Ranks of their own for every run: process groups of gloo keep threads, and models keep process groups, so ranks that
    stayed would grow slower with every layout.
    """

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.megatron.preloaded"])

    def run(self, function: str, layout: Layout, *, timeout: float = 240.0, **arguments: Any) -> list[Any]:
        """Call ``"module:function"`` with ``layout`` and ``arguments`` in every rank; one answer a rank.

        Raises:
            RuntimeError: a rank raised; its traceback is in the message.
            TimeoutError: a rank did not answer in time.
        """
        answers_queue = self._context.Queue()
        # by value: torch would share the tensors' memory, which ends with the process
        request = pickle.dumps((function, layout, arguments))
        answers: dict[int, Any] = {}
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            processes = [
                self._context.Process(target=_rank, args=(rank, request, store, answers_queue))
                for rank in range(layout.world)
            ]
            for process in processes:
                process.start()
            try:
                while len(answers) < layout.world:
                    try:
                        rank, answer, error = pickle.loads(answers_queue.get(timeout=timeout))
                    except queue.Empty:
                        silent = sorted(set(range(layout.world)) - set(answers))
                        raise TimeoutError(
                            f"{function} at {layout}: no answer from ranks {silent} in {timeout:.0f} s"
                        ) from None
                    if error is not None:
                        raise RuntimeError(f"{function} at {layout}, rank {rank}:\n{error}")
                    answers[rank] = answer
                for process in processes:
                    process.join(timeout=30)
            finally:
                for process in processes:
                    if process.is_alive():
                        process.kill()
                    process.join()
        return [answers[rank] for rank in range(layout.world)]


def _rank(rank: int, request: bytes, store: str, answers) -> None:
    """One rank of one run. No daemon: saving a checkpoint starts children."""
    import torch

    torch.set_num_threads(1)
    try:
        function, layout, arguments = pickle.loads(request)
        module, name = function.split(":")
        target = getattr(importlib.import_module(module), name)
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, layout.world), rank=rank, world_size=layout.world
        )
        answers.put(pickle.dumps((rank, target(layout, **arguments), None)))
        # no rank closes its connections while another still talks
        torch.distributed.barrier()
    except BaseException:
        answers.put(pickle.dumps((rank, None, traceback.format_exc())))
    answers.close()
    answers.join_thread()
    # threads of process groups that something still holds would keep the interpreter from ending
    os._exit(0)
