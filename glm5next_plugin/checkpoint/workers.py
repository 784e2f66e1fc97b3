"""Worker processes that take tasks one after another, and die with the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any

from glm5next_plugin.errors import InputError

Advance = Callable[[int], None]
# made once a process from the arguments given, then called with each task
Handler = Callable[[Any], Any]
MakeHandler = Callable[..., Handler]

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2


class WorkerDied(RuntimeError):
    """A worker process ended without an answer."""


def run_tasks(
    make: MakeHandler,
    arguments: Sequence[Any],
    tasks: Sequence[Any],
    *,
    workers: int,
    progress: Advance,
    held: int | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield each task with its result as they finish; in this process if one worker is enough.

    Args:
        make: ``make(*arguments, advance)`` gives the handler; it calls ``advance(n)`` as it gets on.
        arguments: can be pickled.
        tasks: can be pickled; they are started in this order.
        workers: processes.
        progress: called with the sum of what the handlers advanced by since the last call.
        held: a file descriptor that stays open until the last worker is gone.

    Raises:
        InputError: what a handler raised, also OSError as such; the other workers are stopped.
        WorkerDied: a worker was killed.
    """
    if workers <= 1 or len(tasks) <= 1:
        handler = make(*arguments, progress)
        for task in tasks:
            yield task, handler(task)
        return
    context = multiprocessing.get_context(_start_method())
    count = context.Value("Q", 0)
    with contextlib.ExitStack() as stack:
        processes = {}
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            shared = None if held is None else _Inherited(held)
            process = context.Process(
                target=_serve, args=(make, arguments, theirs, count, os.getpid(), shared), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(_stop, process)
            processes[ours] = process
        yield from _dispatch(processes, list(tasks), count, progress)


def _start_method() -> str:
    """A fork starts at once; a process with more than one thread cannot be forked safely."""
    return "fork" if len(os.listdir("/proc/self/task")) == 1 else "spawn"


class _Inherited:
    """A file descriptor of which a spawned process has a copy."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __reduce__(self):
        return _Inherited.received, (DupFd(self.descriptor),)

    @classmethod
    def received(cls, duplicate: Any) -> _Inherited:
        return cls(duplicate.detach())


def _dispatch(processes: dict[Connection, Any], tasks: list[Any], count: Any, progress: Advance) -> Iterator:
    pending, running, seen = tasks[::-1], {}, 0

    def start(connection: Connection) -> None:
        running[connection] = pending.pop()
        # a worker that has already ended is read below: what it raised, or that it died
        with contextlib.suppress(BrokenPipeError):
            connection.send(running[connection])

    for connection in processes:
        start(connection)
    while running:
        ready = wait(list(running), timeout=_POLL_SECONDS)
        if count.value > seen:
            progress(count.value - seen)
            seen = count.value
        for connection in ready:
            task = running.pop(connection)
            try:
                outcome, value = connection.recv()
            except (EOFError, ConnectionResetError):
                processes[connection].join()
                raise WorkerDied(
                    f"a worker process ended with exit code {processes[connection].exitcode} at {task}"
                ) from None
            if outcome == "raised":
                raise value
            # first what is done is the caller's: a worker is never more than one task ahead of what was recorded
            yield task, value
            if pending:
                start(connection)


def _stop(process: Any) -> None:
    process.kill()
    process.join()


def _serve(make: MakeHandler, arguments: Sequence[Any], connection: Connection, count: Any, parent: int, held: Any):
    """Handle tasks until the pipe closes; ``held`` is only kept open."""
    # without it a worker whose parent is killed would go on to write into what a resumed job writes
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the parent takes care

    def advance(amount: int) -> None:
        with count.get_lock():
            count.value += amount

    try:
        handler = make(*arguments, advance)
        while True:
            task = connection.recv()
            connection.send(("done", handler(task)))
    except EOFError:
        return
    except (InputError, OSError) as error:
        connection.send(("raised", error))
    except Exception:
        connection.send(("raised", RuntimeError(traceback.format_exc())))
