"""A process that holds one object and answers calls of its methods: the rollout engine, or a rank of the trainer."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.errors import InputError

# a fresh interpreter: rollout engine and trainer must not inherit each other's imports
_CONTEXT = multiprocessing.get_context("spawn")
# seconds in which an idle process should have ended
_GRACE = 10.0


class WorkerError(RuntimeError):
    """A worker died, did not answer in time or raised; the message names it and its log."""


class Worker:
    """A spawned process that builds ``target(**arguments)`` and then serves calls, one at a time.

    It runs on the CPU, ignores Ctrl-C (its owner decides) and ends when its owner does. Its output goes to ``log``.

    Args:
        name: how messages call it.
        target: ``"module:callable"``, imported in the process.
        arguments: of the callable; picklable.
        log: file for its standard output and error.
        setup: ``"module:callable"``, called with ``target`` in the process before anything is built.

    Attributes:
        connection: becomes readable when an answer is there.
    """

    def __init__(self, name: str, target: str, arguments: dict[str, Any], log: Path, *, setup: str | None = None):
        self.name = name
        self._log = log
        self.connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_serve, args=(theirs, target, arguments, str(log), setup), name=name, daemon=True
        )
        with _worker_environment():
            self._process.start()
        theirs.close()
        self._waiting: str | None = "start"

    def submit(self, method: str, *args: Any) -> None:
        """Start a call; :meth:`result` waits for it.

        Raises:
            WorkerError: the process is dead.
        """
        try:
            self.connection.send((method, args))
        except OSError:
            raise self._died(method) from None
        self._waiting = method

    def result(self, timeout: float) -> Any:
        """The answer to the last :meth:`submit`, or ``None`` once the object is built if there was none.

        Args:
            timeout: seconds.

        Raises:
            WorkerError: no answer in time, a dead process, or an exception there.
            InputError: what the object refused as a bad input or setting.
        """
        method = self._waiting
        try:
            if not self.connection.poll(timeout):
                raise self.late(timeout)
            kind, value = self.connection.recv()
            self._waiting = None
        except (EOFError, ConnectionResetError):
            raise self._died(method) from None
        if kind == "refused":
            raise InputError(value)
        if kind == "raised":
            raise WorkerError(f"{self.name} failed in {method!r}: {value}; its log: {self._log}")
        return value

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """:meth:`submit` and :meth:`result` in one."""
        self.submit(method, *args)
        return self.result(timeout)

    def late(self, timeout: float) -> WorkerError:
        """The error that the call in progress took longer than ``timeout`` seconds."""
        return WorkerError(f"{self.name} did not finish {self._waiting!r} within {timeout:g} s; its log: {self._log}")

    def release(self) -> None:
        """Let an idle process go, without waiting for its end; no call can follow."""
        self.connection.close()

    def close(self) -> None:
        """End the process and wait: an idle one leaves by itself, another is killed."""
        self.release()
        self._process.join(timeout=_GRACE if self._waiting is None else 0)
        self._process.kill()
        self._process.join()

    def _died(self, method: str | None) -> WorkerError:
        self._process.join(timeout=5)
        code = self._process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return WorkerError(f"{self.name} died {how} during {method!r}; its log: {self._log}")


def gather(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """:meth:`Worker.result` of several workers at once; the first failure ends the wait for the others.

    Ranks that wait in a collective for one that failed would answer late or never.

    Raises:
        WorkerError, InputError: as :meth:`Worker.result`.
    """
    deadline = time.monotonic() + timeout
    answers: dict[Worker, Any] = {}
    while waiting := [worker for worker in workers if worker not in answers]:
        ready = wait([worker.connection for worker in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise waiting[0].late(timeout)
        for worker in waiting:
            if worker.connection in ready:
                answers[worker] = worker.result(0.0)
    return [answers[worker] for worker in workers]


def resolve(target: str) -> Any:
    """The object behind ``"module:name"``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """What a process started inside inherits. It may import torch before any code of ours runs there."""
    # CPUs even where a GPU is present; progress bars are noise in a log
    changed = dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    # operators of a small model are too short for several threads: they would wait for one another
    changed["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, target: str, arguments: dict[str, Any], log: str, setup: str | None) -> None:
    """Body of the process: build, answer calls, end when the owner's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())

    served = None

    def build() -> None:
        nonlocal served
        if setup is not None:
            resolve(setup)(target)
        served = resolve(target)(**arguments)

    work, args = build, ()
    while True:
        try:
            answer = ("done", work(*args))
        except (InputError, ConfigError) as error:
            traceback.print_exc()
            answer = ("refused", str(error))
        except Exception as error:
            traceback.print_exc()
            answer = ("raised", f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        try:
            connection.send(answer)
            method, args = connection.recv()
        except (EOFError, OSError):
            return
        work = getattr(served, method)
