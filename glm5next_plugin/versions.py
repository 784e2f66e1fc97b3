"""Which versions work, in one table, and the check that names what was found and what is needed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Literal

from packaging.specifiers import SpecifierSet

from glm5next_plugin.errors import VersionError

PYTHON = "Python"


@dataclasses.dataclass(frozen=True)
class Supported:
    """One row of the table.

    Attributes:
        distribution: name on the package index, or :data:`PYTHON`.
        specifier: PEP 440 range that works.
        extra: extra of this package that installs it; ``None`` for what every installation needs.
        why: what goes wrong outside the range, or what the range is good for.
        optional: outside the range one ability is missing and all else works.
    """

    distribution: str
    specifier: str
    extra: str | None
    why: str
    optional: bool = False


# Of transformers' own glm5_next: the model that the tests compare with and that samples in the bring-up.
HF_REFERENCE = {"transformers": ">=5.17"}

SUPPORTED = (
    Supported(PYTHON, ">=3.12", None, "megatron-core 0.19 and Megatron-Bridge 0.6 need it"),
    Supported("torch", ">=2.11", None, "oldest that was tested"),
    Supported("transformers", ">=5.8", None, "oldest that Megatron-Bridge 0.6 accepts"),
    Supported(
        "transformers",
        HF_REFERENCE["transformers"],
        None,
        "its own glm5_next, the rollout engine of bringup",
        optional=True,
    ),
    Supported("triton", ">=3.6", "megatron", "megatron-core imports it; comes with torch"),
    Supported("megatron-core", ">=0.19.0,<0.20", "megatron", "lists of layer specs, absorbed MLA"),
    Supported("megatron-bridge", ">=0.6.0,<0.7", "megatron", "bridges registered by name"),
    Supported("fla-core", ">=0.6.0", "kernels", "older KDA kernels leak future tokens"),
    Supported("tilelang", ">=0.1.12", "kernels", "as old as SGLang pins it"),
    Supported("sglang", ">=0.5.16", "sglang", "oldest whose model registry and memory pools fit"),
    Supported("verl", ">=0.9.1,<0.10", "verl", "its engine registry"),
)

# Distribution -> what it cannot work with although its metadata or an override allows it.
COMPANIONS = {
    "megatron-bridge": Supported(
        "transformers", ">=5.8,<5.24", "megatron", "5.24 dropped a module that Megatron-Bridge 0.6 imports"
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is installed of one distribution: ``absent``, or ``ok`` or ``wrong`` against ``needed``."""

    distribution: str
    found: str | None
    needed: str

    @property
    def state(self) -> Literal["ok", "absent", "wrong"]:
        if self.found is None:
            return "absent"
        # Nightly and vendor builds ("2.12.0a0+nv26.1") count by their place in the order of versions.
        return "ok" if SpecifierSet(self.needed).contains(self.found, prereleases=True) else "wrong"

    def __str__(self) -> str:
        found = f"{self.found} found" if self.found else "not found"
        reasons = {(row.distribution, row.specifier): row.why for row in (*SUPPORTED, *COMPANIONS.values())}
        why = reasons.get((self.distribution, self.needed))
        return f"{self.distribution} {found}, {self.needed or 'any version'} needed" + (f" ({why})" if why else "")


def found(distribution: str) -> str | None:
    """Installed version, or ``None``. Reads metadata only; nothing is imported."""
    if distribution == PYTHON:
        return platform.python_version()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find(requires: Mapping[str, str]) -> list[Finding]:
    """Compare each distribution with its specifier (``""``: any version)."""
    return [Finding(name, found(name), specifier) for name, specifier in requires.items()]


def requirements(*distributions: str) -> dict[str, str]:
    """Rows of the table as distribution -> specifier, for ``requires`` of an adapter's description.

    Companions of a distribution come with it.

    Raises:
        KeyError: a distribution without a row.
    """
    table = {row.distribution: row.specifier for row in SUPPORTED if not row.optional}
    companions = [COMPANIONS[name] for name in distributions if name in COMPANIONS]
    return {name: table[name] for name in distributions} | {row.distribution: row.specifier for row in companions}


def require(requires: Mapping[str, str], *, extra: str | None = None) -> None:
    """Refuse to go on with a version that is absent or was never seen to work.

    Raises:
        VersionError: names every distribution at fault, found and needed, and the extra that installs it.
    """
    faults = [str(finding) for finding in find(requires) if finding.state != "ok"]
    if faults:
        remedy = f"; install the extra glm5next-plugin[{extra}]" if extra else ""
        raise VersionError("; ".join(faults) + remedy)
