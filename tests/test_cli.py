"""The ``glm5next`` application: lazy commands, one line for what a user can mend, exit codes."""

import importlib
import inspect
import os
import signal
import subprocess
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.cli import main
from glm5next_plugin.errors import InputError, PluginError, VersionError


@pytest.fixture
def command(monkeypatch):
    """Puts a function in the place of ``glm5next doctor``."""

    def place(function) -> None:
        module = types.ModuleType("glm5next_plugin.cli.doctor")
        module.doctor = function
        monkeypatch.setitem(sys.modules, "glm5next_plugin.cli.doctor", module)

    return place


def run(*arguments: str):
    return CliRunner().invoke(main.app, list(arguments))


def raiser(error: BaseException):
    def doctor() -> None:
        raise error

    return doctor


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_listed_command_has_its_file_its_help_and_examples(name):
    module = importlib.import_module(f"glm5next_plugin.cli.{name}")
    assert inspect.getdoc(getattr(module, name))
    shown = run(name, "--help")
    assert shown.exit_code == 0
    assert "Examples" in shown.output and f"glm5next {name}" in shown.output


def test_help_lists_the_commands_without_importing_them():
    code = """
import sys
from typer.testing import CliRunner
from glm5next_plugin.cli.main import app
print(CliRunner().invoke(app, ["--help"]).output)
print([name for name in sys.modules if name.startswith("glm5next_plugin.cli.") and not name.endswith(".main")])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in main.COMMANDS)
    assert shown.endswith("[]\n")


def test_without_arguments_the_help_is_shown_and_the_exit_code_is_2():
    shown = run()
    assert shown.exit_code == 2
    assert "doctor" in shown.output


def test_a_misspelt_command_is_refused_with_the_right_spelling():
    refused = run("docter")
    assert refused.exit_code == 2
    assert "Did you mean 'doctor'" in refused.output


def test_an_unknown_option_is_refused_with_2():
    assert run("doctor", "--jsn").exit_code == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("shard 2 is missing;\ncopy it"), "glm5next: error: shard 2 is missing; copy it\n"),
        (VersionError("fla-core 0.5 found"), "glm5next: error: fla-core 0.5 found\n"),
        (PluginError("sglang", "failed"), "glm5next: error: plugin 'sglang': failed\n"),
        (
            ConfigError("index_kpool", None, "a value"),
            "glm5next: error: config field 'index_kpool': found None; needed: a value\n",
        ),
        (FileNotFoundError(2, "No such file", "x.json"), "glm5next: error: [Errno 2] No such file: 'x.json'\n"),
    ],
)
def test_what_a_user_can_mend_is_one_line_on_stderr_and_exit_code_2(error, line, command):
    command(raiser(error))
    result = run("doctor")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


def test_a_fault_of_ours_keeps_its_traceback(command):
    command(raiser(ZeroDivisionError("division by zero")))
    assert isinstance(run("doctor").exception, ZeroDivisionError)


def test_a_command_may_exit_with_1(command):
    command(raiser(typer.Exit(1)))
    assert run("doctor").exit_code == 1


def test_an_interrupt_gives_130():
    code = """
import sys, time, types
module = types.ModuleType("glm5next_plugin.cli.doctor")
def doctor() -> None:
    print("running", flush=True)
    time.sleep(60)
module.doctor = doctor
sys.modules["glm5next_plugin.cli.doctor"] = module
sys.argv = ["glm5next", "doctor"]
from glm5next_plugin.cli.main import app
app()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"running\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
