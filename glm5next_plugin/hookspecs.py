"""What a plugin may offer. Each function is one hook; its docstring is the contract.

A plugin is a module (or object) named by an entry point of group ``glm5next.adapters`` whose functions carry
:data:`hookimpl`. Every hook is optional. Importing a plugin must be cheap: hooks import their framework when called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pluggy

PROJECT = "glm5next"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

CheckStatus = Literal["native", "hooked", "missing", "ok", "error"]


@dataclasses.dataclass(frozen=True)
class AdapterDescription:
    """What an adapter is and needs.

    Attributes:
        name: the framework's name, as users call it.
        extra: the extra of this package that installs the framework; ``None`` for a plugin of another distribution.
        requires: distribution name -> PEP 440 specifier of the versions it works with (``""``: any).
        summary: one line for people.
    """

    name: str
    extra: str | None
    requires: Mapping[str, str]
    summary: str


@dataclasses.dataclass(frozen=True)
class Check:
    """One seam between an adapter and its framework.

    Attributes:
        name: what the seam is, e.g. ``"AutoBridge registration"``.
        status: ``native`` the framework has it; ``hooked`` we supply it; ``missing`` it is not there and something
            cannot be done without it; ``ok`` a plain check passed; ``error`` installed, but unusable.
        detail: what was found and, unless all is well, what to do.
    """

    name: str
    status: CheckStatus
    detail: str


@hookspec
def glm5next_describe() -> AdapterDescription:
    """Say what the adapter is and which versions it needs. Must not import the framework."""


@hookspec
def glm5next_check() -> list[Check]:
    """Look at the installed framework, seam by seam. Called only when every requirement is met."""


@hookspec
def glm5next_install() -> None:
    """Make the framework know the model (registries, one gated patch). Must be safe to call twice."""


@hookspec
def glm5next_register_kernels(register: Callable[..., Any]) -> None:
    """Offer operator backends: call ``register(operator_name, backend_name, loader, supports=...)`` for each.

    ``register`` is :func:`glm5next_plugin.ops.dispatch.register_backend`; the loader is called on first use.
    """
