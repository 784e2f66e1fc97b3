"""Workers: what comes back, and what their death, silence and errors look like."""

import os
import signal
import time

import pytest

from glm5next_plugin.bringup.process import Worker, WorkerError, gather
from glm5next_plugin.errors import InputError


class Echo:
    """Served by the workers of these tests."""

    def __init__(self, word="", refuse=False):
        if refuse:
            raise InputError("tp 3 does not divide 2 heads")
        self.word = word

    def say(self, other):
        return f"{self.word} {other}"

    def sleep(self, seconds):
        time.sleep(seconds)

    def crash(self):
        raise KeyError("layer 3")

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def environment(self):
        return dict(os.environ), signal.getsignal(signal.SIGINT)


def remember_setup(target):
    print(f"set up for {target}", flush=True)


@pytest.fixture
def echo(tmp_path):
    worker = Worker("the echo", f"{__name__}:Echo", dict(word="hello"), tmp_path / "echo.log")
    assert worker.result(60) is None
    yield worker
    worker.close()


def test_a_call_returns_what_the_method_returns(echo):
    assert echo.call("say", "world", timeout=10) == "hello world"


def test_it_has_no_gpu_and_leaves_ctrl_c_to_its_owner(echo):
    environment, on_interrupt = echo.call("environment", timeout=10)
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["OMP_NUM_THREADS"] == "1"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    assert on_interrupt == signal.SIG_IGN


def test_an_exception_names_worker_method_and_log_and_the_worker_goes_on(echo, tmp_path):
    with pytest.raises(WorkerError, match=r"the echo failed in 'crash': KeyError: 'layer 3'; its log: .*echo.log"):
        echo.call("crash", timeout=10)
    assert "in crash" in (tmp_path / "echo.log").read_text()
    assert echo.call("say", "again", timeout=10) == "hello again"


def test_a_death_says_how_and_during_what(echo):
    with pytest.raises(WorkerError, match="the echo died by signal SIGKILL during 'die'"):
        echo.call("die", timeout=10)
    with pytest.raises(WorkerError, match="the echo died by signal SIGKILL during 'say'"):
        echo.call("say", "more", timeout=10)


def test_no_answer_in_time_is_an_error_and_close_does_not_wait_for_it(echo):
    with pytest.raises(WorkerError, match="the echo did not finish 'sleep' within 0.1 s"):
        echo.call("sleep", 60, timeout=0.1)
    started = time.monotonic()
    echo.close()
    assert time.monotonic() - started < 5


def test_a_refused_setting_stays_an_input_error(tmp_path):
    worker = Worker("the echo", f"{__name__}:Echo", dict(refuse=True), tmp_path / "log")
    with pytest.raises(InputError, match="tp 3 does not divide 2 heads"):
        worker.result(60)
    worker.close()


def test_setup_runs_before_anything_is_built(tmp_path):
    worker = Worker("the echo", f"{__name__}:Echo", {}, tmp_path / "log", setup=f"{__name__}:remember_setup")
    worker.result(60)
    worker.close()
    assert f"set up for {__name__}:Echo" in (tmp_path / "log").read_text()


def test_a_failure_ends_the_wait_for_workers_that_are_busy(echo, tmp_path):
    other = Worker("the other", f"{__name__}:Echo", {}, tmp_path / "other.log")
    other.result(60)
    echo.submit("sleep", 60)
    other.submit("crash")
    with pytest.raises(WorkerError, match="the other failed in 'crash'"):
        gather([echo, other], timeout=30)
    other.close()


def test_answers_of_several_workers_come_in_their_order(echo, tmp_path):
    other = Worker("the other", f"{__name__}:Echo", dict(word="bye"), tmp_path / "other.log")
    other.result(60)
    echo.submit("say", "1")
    other.submit("say", "2")
    assert gather([echo, other], timeout=30) == ["hello 1", "bye 2"]
    other.submit("sleep", 60)
    with pytest.raises(WorkerError, match="the other did not finish 'sleep' within 0.2 s"):
        gather([other], timeout=0.2)
    other.close()
