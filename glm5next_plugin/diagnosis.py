"""What is installed, what fits together and what is broken. ``glm5next doctor`` shows it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from glm5next_plugin import plugins, versions
from glm5next_plugin.errors import PluginError
from glm5next_plugin.hookspecs import Check

if TYPE_CHECKING:
    from glm5next_plugin.ops.dispatch import OperatorBackends

AdapterState = Literal["ready", "absent", "broken"]


@dataclasses.dataclass(frozen=True)
class VersionRow:
    """One line of the table of versions.

    ``state``: ``ok``; ``absent`` (an extra that is not installed); ``limited`` (one ability is missing); ``missing`` or
    ``wrong`` (broken).
    """

    distribution: str
    found: str | None
    needed: str
    state: Literal["ok", "absent", "limited", "missing", "wrong"]
    extra: str | None
    why: str


@dataclasses.dataclass(frozen=True)
class AdapterRow:
    """One adapter: whether it can load, why not, and its seams with the framework."""

    name: str
    offered_by: str
    state: AdapterState
    detail: str
    extra: str | None = None
    checks: Sequence[Check] = ()


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings. ``faults`` has one line for each installed thing that cannot be used."""

    versions: Sequence[VersionRow]
    adapters: Sequence[AdapterRow]
    operators: Sequence[OperatorBackends]
    faults: Sequence[str]

    @property
    def healthy(self) -> bool:
        """Nothing required is broken; frameworks that are not installed do not count."""
        return not self.faults


def diagnose() -> Diagnosis:
    """Look at this environment. Imports the frameworks that are installed; never raises for what it finds."""
    with _quiet():
        version_rows = [_version_row(row) for row in versions.SUPPORTED]
        adapters = [_adapter_row(name) for name in _plugin_names()]
        operators, operator_faults = _operators()
    faults = [
        str(versions.Finding(row.distribution, row.found, row.needed))
        for row in version_rows
        if row.state in ("missing", "wrong")
    ]
    for adapter in adapters:
        failed = [f"{check.name}: {check.detail}" for check in adapter.checks if check.status == "error"]
        if adapter.state == "broken":
            faults += [f"adapter {adapter.name!r}: {reason}" for reason in failed or [adapter.detail]]
    return Diagnosis(version_rows, adapters, operators, [*faults, *operator_faults])


def _version_row(row: versions.Supported) -> VersionRow:
    finding = versions.Finding(row.distribution, versions.found(row.distribution), row.specifier)
    state = finding.state
    if state != "ok" and row.optional:
        state = "limited"
    elif state == "absent" and row.extra is None:
        state = "missing"
    return VersionRow(row.distribution, finding.found, row.specifier, state, row.extra, row.why)


def _plugin_names() -> list[str]:
    registry = plugins.registry()
    return sorted({*registry.names(), *registry.failures})


def _adapter_row(name: str) -> AdapterRow:
    registry = plugins.registry()
    offered_by = registry.distributions.get(name, "")
    if name in registry.failures:
        return AdapterRow(name, offered_by, "broken", registry.failures[name].reason)
    try:
        description = registry.call(name, "glm5next_describe")
        extra, summary = (description.extra, description.summary) if description else (None, "")
        findings = versions.find(description.requires) if description else []
        unmet = "; ".join(str(finding) for finding in findings if finding.state != "ok")
        if unmet:
            state = "absent" if any(finding.state == "absent" for finding in findings) else "broken"
            return AdapterRow(name, offered_by, state, unmet, extra)
        checks = registry.call(name, "glm5next_check") or []
    except Exception as error:  # whatever a plugin raises or returns is a finding
        return AdapterRow(name, offered_by, "broken", error.reason if isinstance(error, PluginError) else _line(error))
    broken = any(check.status == "error" for check in checks)
    return AdapterRow(name, offered_by, "broken" if broken else "ready", summary, extra, checks)


def _operators() -> tuple[list[OperatorBackends], list[str]]:
    try:
        from glm5next_plugin.ops import dispatch

        return dispatch.describe_backends(), []
    except Exception as error:  # a broken torch, a plugin whose registration fails, a wrong choice
        return [], [f"operators: {_line(error)}"]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Frameworks warn, log and print while they are imported; none of it is a finding or may reach stdout."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
