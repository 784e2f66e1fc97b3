"""Tasks over worker processes: forked, spawned and in this process."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from glm5next_plugin.checkpoint import workers
from glm5next_plugin.checkpoint.workers import WorkerDied, run_tasks
from glm5next_plugin.errors import InputError


def make_square(offset, advance):
    def handle(task):
        advance(task)
        return offset + task * task, os.getpid()

    return handle


def make_trouble(kind, advance):
    def handle(task):
        if task != 3:
            time.sleep(0.01)
            return task
        match kind:
            case "input":
                raise InputError("shard 3: found: nothing")
            case "disk":
                raise OSError(28, "No space left on device", "shard-3")
            case "defect":
                return {}["a key that is not there"]
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)

    return handle


def make_broken(advance):
    raise InputError("no handler")


@pytest.fixture
def workers_left():
    """Children of this process that it did not have before, apart from the one that Python keeps for spawned ones."""
    before = {child.pid for child in psutil.Process().children()}

    def left():
        # that one shows another command for a moment while it starts
        for _ in range(50):
            found = [child for child in psutil.Process().children() if child.pid not in before]
            found = [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]
            if not found:
                break
            time.sleep(0.1)
        return found

    return left


@pytest.fixture(params=["in this process", "fork", "spawn"])
def workers_of(request, monkeypatch):
    """The count of workers that runs tasks this way."""
    monkeypatch.setattr(workers, "_start_method", lambda: request.param)
    return 1 if request.param == "in this process" else 2


def test_each_task_comes_back_once_with_its_result(workers_of, workers_left):
    advanced = []
    done = list(run_tasks(make_square, (100,), range(1, 20), workers=workers_of, progress=advanced.append))
    assert sorted((task, value) for task, (value, _) in done) == [(n, 100 + n * n) for n in range(1, 20)]
    assert sum(advanced) == 190
    pids = {pid for _, (_, pid) in done}
    assert pids == {os.getpid()} if workers_of == 1 else os.getpid() not in pids
    assert not workers_left()


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("input", InputError, "shard 3: found: nothing"),
        ("disk", OSError, "No space left on device: 'shard-3'"),
        ("defect", (RuntimeError, KeyError), "a key that is not there"),
    ],
)
def test_what_a_handler_raises_is_raised_here(workers_of, workers_left, kind, error, message):
    with pytest.raises(error, match=message):
        list(run_tasks(make_trouble, (kind,), range(10), workers=workers_of, progress=print))
    assert not workers_left()


def test_a_handler_that_cannot_be_made(workers_of):
    with pytest.raises(InputError, match="no handler"):
        list(run_tasks(make_broken, (), range(4), workers=workers_of, progress=print))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_dies_is_named_with_its_task(monkeypatch, workers_left, method):
    monkeypatch.setattr(workers, "_start_method", lambda: method)
    with pytest.raises(WorkerDied, match="exit code -9 at 3"):
        list(run_tasks(make_trouble, ("killed",), range(10), workers=2, progress=print))
    assert not workers_left()


def test_no_task_is_sent_before_the_result_is_taken(monkeypatch, tmp_path):
    """What a resumed job redoes is at most what the workers had begun."""
    monkeypatch.setattr(workers, "_start_method", lambda: "fork")
    results = run_tasks(make_marks, (tmp_path,), range(10), workers=2, progress=print)
    for taken in range(1, 5):
        next(results)
        time.sleep(0.1)
        # the second worker's first result waits while this one's task is not yet replaced
        assert len(list(tmp_path.iterdir())) <= taken + 1
    results.close()


def make_marks(folder, advance):
    def handle(task):
        (folder / str(task)).touch()

    return handle


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_die_with_a_parent_that_is_killed(method, tmp_path):
    """And let go of the descriptor that says that somebody works."""
    lock = tmp_path / "lock"
    parent = subprocess.Popen([sys.executable, __file__, method, str(lock)], stdout=subprocess.PIPE, text=True)
    children = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
    # a worker that is killed while the disk is slow ends late; until then its files are not another job's
    for child in children:
        assert str(lock) in {os.path.realpath(file) for file in Path(f"/proc/{child.pid}/fd").iterdir()}
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not lock_is_taken(lock)


def lock_is_taken(path):
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def make_sleeper(advance):
    def handle(task):
        os.write(1, f"{os.getpid()}\n".encode())  # in one piece: the other worker writes as well
        time.sleep(600)

    return handle


def main(method, lock):
    """A parent with two workers that sleep, and a lock that they hold."""
    workers._start_method = lambda: method
    with Path(lock).open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        list(run_tasks(make_sleeper, (), range(4), workers=2, progress=print, held=stream.fileno()))


if __name__ == "__main__":
    main(*sys.argv[1:])
