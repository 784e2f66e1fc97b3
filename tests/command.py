"""The real ``glm5next``."""

import subprocess
import sys
from pathlib import Path

GLM5NEXT = str(Path(sys.executable).with_name("glm5next"))


def run_glm5next(*arguments: Path | str) -> subprocess.CompletedProcess:
    """Run it and return what it printed."""
    return subprocess.run([GLM5NEXT, *map(str, arguments)], capture_output=True, text=True, timeout=280)


def run_convert(*arguments: Path | str) -> subprocess.CompletedProcess:
    """Run ``glm5next convert``."""
    return run_glm5next("convert", *arguments)
