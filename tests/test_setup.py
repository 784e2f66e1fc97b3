"""``make setup``: the search for a Python 3.12 that runs, and when the environment is made again."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = str(Path(sys.executable).resolve())


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def link(file: Path, target: str) -> Path:
    """A launcher of ``target``; a symbolic link would change where Python looks for its library."""
    return script(file, f'exec "{target}" "$@"')


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the search with a PATH that holds ``tmp_path/bin`` and the tools of the script, and an empty HOME."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "dirname", "ls", "cat"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    variables = {"PATH": f"{tmp_path / 'bin'}:{tools}", "HOME": str(tmp_path / "home"), **environment}
    command = [shutil.which("bash"), str(ROOT / "requirements/find-python.sh")]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_python_on_path_is_taken(tmp_path):
    python = link(tmp_path / "bin/python3.12", PYTHON)
    assert find_python(tmp_path).stdout == f"{python}\n"


def test_a_shim_that_refuses_is_passed_over_for_the_version_that_pyenv_has(tmp_path):
    script(tmp_path / "bin/python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    python = link(tmp_path / "pyenv/versions/3.12.1/bin/python3.12", PYTHON)
    assert find_python(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv")).stdout == f"{python}\n"


def test_versions_beside_the_folder_of_a_shim_are_found_without_pyenv_root(tmp_path):
    script(tmp_path / "bin/python3.12", "exit 127")
    python = link(tmp_path / "versions/3.12.9/bin/python3.12", PYTHON)
    assert Path(find_python(tmp_path).stdout.strip()).resolve() == python


def test_a_python_of_another_version_is_passed_over(tmp_path):
    script(
        tmp_path / "bin/python3.12",
        f"""exec "{PYTHON}" -c "import sys; sys.version_info = (3, 13, 1)
$2" """,
    )
    python = link(tmp_path / "bin/python3", PYTHON)
    assert find_python(tmp_path).stdout == f"{python}\n"


def test_the_python_that_uv_knows_is_found(tmp_path):
    python = link(tmp_path / "elsewhere/python", PYTHON)
    script(tmp_path / "bin/uv", f'[ "$*" = "python find --no-python-downloads 3.12" ] && echo {python}')
    assert find_python(tmp_path).stdout == f"{python}\n"


def test_without_a_python_the_message_says_what_to_install(tmp_path):
    result = find_python(tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "no Python 3.12" in result.stderr and "PYTHON=" in result.stderr


def test_a_named_python_that_does_not_run_is_refused_and_no_other_is_taken(tmp_path):
    link(tmp_path / "bin/python3.12", PYTHON)
    result = find_python(tmp_path, PYTHON="/nowhere/python3.12")
    assert (result.returncode, result.stdout) == (1, "")
    assert "PYTHON=/nowhere/python3.12" in result.stderr


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose Python makes an environment in which pip only notes that it was called."""
    root = tmp_path / "checkout"
    (root / "requirements").mkdir(parents=True)
    for name in ("setup.sh", "find-python.sh"):
        shutil.copy(ROOT / "requirements" / name, root / "requirements")
    (root / "requirements/cpu.txt").write_text("first==1\n")
    (root / "pyproject.toml").write_text("")
    python = script(
        tmp_path / "venv_python", '[ "$2" = pip ] && echo "$*" >>"$(dirname "$0")/calls"; exit ${PIP_EXIT:-0}'
    )
    script(
        tmp_path / "python3.12",
        f'if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp {python} "$3/bin/python"; echo made >>{tmp_path}/made; fi',
    )
    return root


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": str(checkout.parent / "python3.12"), **environment}
    command = ["bash", str(checkout / "requirements/setup.sh")]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def pip_calls(checkout: Path) -> int:
    return len((checkout / ".venv/bin/calls").read_text().splitlines())


def times_made(checkout: Path) -> int:
    return len((checkout.parent / "made").read_text().splitlines())


def test_a_finished_environment_is_left_alone(checkout):
    assert setup(checkout).returncode == 0
    assert pip_calls(checkout) == 2  # the list, the project
    again = setup(checkout)
    assert (again.returncode, again.stdout, pip_calls(checkout)) == (0, "", 2)


@pytest.mark.parametrize("file", ["requirements/cpu.txt", "pyproject.toml"])
def test_a_changed_list_is_installed_into_the_same_environment(file, checkout):
    setup(checkout)
    (checkout / file).write_text("changed\n")
    assert setup(checkout).returncode == 0
    assert (pip_calls(checkout), times_made(checkout)) == (4, 1)


def test_an_installation_that_failed_is_made_again_from_nothing(checkout):
    assert setup(checkout, PIP_EXIT="1").returncode != 0
    assert setup(checkout).returncode == 0
    assert times_made(checkout) == 2


def test_an_environment_whose_python_is_gone_is_made_again(checkout):
    setup(checkout)
    (checkout / ".venv/bin/python").unlink()
    assert setup(checkout).returncode == 0
    assert times_made(checkout) == 2


def test_a_checkout_that_was_moved_installs_itself_anew(checkout):
    setup(checkout)
    moved = checkout.rename(checkout.parent / "moved")
    assert setup(moved).returncode == 0
    assert pip_calls(moved) == 4
