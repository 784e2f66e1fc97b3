"""A pool of processes that import Megatron once and then run one parallel layout after another over gloo."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
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
    """``size`` spawned processes; :meth:`run` calls one function in the first ``layout.world`` of them."""

    def __init__(self, size: int):
        self._size = size
        self._processes: list[multiprocessing.Process] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests = [context.Queue() for _ in range(self._size)]
        self._answers = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, os.getpid(), self._requests[rank], self._answers))
            for rank in range(self._size)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: str, layout: Layout, *, timeout: float = 240.0, **arguments: Any) -> list[Any]:
        """Call ``"module:function"`` with ``layout`` and ``arguments`` in every rank; one answer a rank.

        Raises:
            RuntimeError: a rank raised; its traceback is in the message.
            TimeoutError: a rank did not answer in time; the pool is killed and starts anew at the next call.
        """
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            for rank in range(layout.world):
                self._requests[rank].put((function, layout, store, arguments))
            answers: dict[int, Any] = {}
            while len(answers) < layout.world:
                try:
                    rank, answer, error = self._answers.get(timeout=timeout)
                except queue.Empty:
                    silent = sorted(set(range(layout.world)) - set(answers))
                    self.close()
                    raise TimeoutError(
                        f"{function} at {layout}: no answer from ranks {silent} in {timeout:.0f} s"
                    ) from None
                if error is not None:
                    self.close()
                    raise RuntimeError(f"{function} at {layout}, rank {rank}:\n{error}")
                answers[rank] = answer
        return [answers[rank] for rank in range(layout.world)]

    def close(self) -> None:
        """End the processes: those that answer end themselves and their children, the others are killed."""
        for requests in self._requests if self._processes else []:
            requests.put(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []


def _serve(rank: int, parent: int, requests, answers) -> None:
    """Answer requests until the test process is gone. No daemon: saving a checkpoint starts children."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while os.getppid() == parent:
        try:
            request = requests.get(timeout=5)
        except queue.Empty:
            continue
        if request is None:
            return
        function, layout, store, arguments = request
        try:
            module, name = function.split(":")
            target = getattr(importlib.import_module(module), name)
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.FileStore(store, layout.world), rank=rank, world_size=layout.world
            )
            try:
                answers.put((rank, target(layout, **arguments), None))
            finally:
                torch.distributed.destroy_process_group()
        except BaseException:
            answers.put((rank, None, traceback.format_exc()))
