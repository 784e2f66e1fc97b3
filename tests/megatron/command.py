"""The real ``glm5next convert``."""

import subprocess
import sys
from pathlib import Path

GLM5NEXT = str(Path(sys.executable).with_name("glm5next"))


def run_convert(*arguments: Path | str) -> subprocess.CompletedProcess:
    """Run it and return what it printed."""
    return subprocess.run([GLM5NEXT, "convert", *map(str, arguments)], capture_output=True, text=True, timeout=280)
