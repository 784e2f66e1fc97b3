"""Every extra can be installed: alone, and with the override list where frameworks contradict each other.

These ask the package index (marker ``network``), as of a fixed day, so that a release of tomorrow changes nothing.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OVERRIDES = ("--override", "requirements/overrides.txt")
DAY = "2026-12-01"

pytestmark = pytest.mark.network


def resolve(extras: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    wanted = [part for extra in extras for part in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", *wanted, *options]
    command += ["--quiet", "--no-header", "--no-annotate", "--python", sys.executable, "--exclude-newer", DAY]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def versions(resolved: subprocess.CompletedProcess[str]) -> dict[str, Version]:
    assert resolved.returncode == 0, resolved.stderr
    pairs = (line.split(" ;")[0].split("==") for line in resolved.stdout.splitlines())
    return {name: Version(version) for name, version in pairs}


@pytest.mark.parametrize("extra", ["kernels", "sglang", "verl", "dev"])
def test_extra_resolves_by_itself(extra):
    assert versions(resolve([extra]))["transformers"] >= Version("5.8")


@pytest.mark.parametrize(
    "extras", [["megatron"], ["megatron", "kernels"], ["megatron", "kernels", "verl", "dev"]], ids=str
)
def test_extras_with_megatron_resolve_with_the_overrides_to_a_transformers_that_knows_the_model(extras):
    found = versions(resolve(extras, *OVERRIDES))
    assert Version("5.17") <= found["transformers"] < Version("5.24")
    assert Version("0.19") <= found["megatron-core"] < Version("0.20")
    assert Version("0.6") <= found["megatron-bridge"] < Version("0.7")
    assert found.get("fla-core", Version("0.6")) >= Version("0.6")


def test_megatron_with_kernels_needs_the_overrides():
    assert resolve(["megatron", "kernels"]).returncode != 0
