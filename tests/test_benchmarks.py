"""The benchmarks run; what they say of speed is read where they are run at their own size."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_conversion_at_1_gb(tmp_path):
    """Memory is bound at every size, so here too."""
    results = tmp_path / "convert.json"
    command = [sys.executable, BENCHMARKS / "convert.py", "--gb", "1", "--rounds", "1", "--minimum-of-cp", "0"]
    finished = subprocess.run(
        [*command, "--directory", tmp_path / "work", "--results", results], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(results.read_text())
    names = [row["name"] for row in report["runs"]]
    assert names == ["cp", "BF16 to torch_dist", "torch_dist to BF16", "torch_dist to FP8", "FP8 to torch_dist"]
    print(finished.stdout)
    assert all(row["memory"] < 6e9 for row in report["runs"])
    assert not (tmp_path / "work").exists()
