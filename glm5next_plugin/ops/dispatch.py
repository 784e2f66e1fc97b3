"""Which implementation of an operator runs: the torch reference, or a backend chosen by name.

A choice is made for each operator, never guessed: ``GLM5NEXT_BACKEND="rms_norm=triton,kda=fla"`` in the environment,
or :func:`set_backend` in the process, which goes first. Without a choice the reference runs. A chosen backend that is
unknown, cannot be loaded or does not support the arguments is an error; nothing falls back.

Backends come from :func:`register_backend`: ours when their file is imported, those of other distributions through the
hook ``glm5next_register_kernels``. Plugins are loaded when a backend is looked up that nobody registered before.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from glm5next_plugin.errors import InputError

ENVIRONMENT_VARIABLE = "GLM5NEXT_BACKEND"
REFERENCE = "reference"


class BackendError(InputError):
    """A choice of backend that cannot be met."""


@dataclasses.dataclass(frozen=True)
class _Backend:
    loader: Callable[[], Callable[..., Any]]
    supports: Callable[..., str | None] | None


@dataclasses.dataclass(frozen=True)
class OperatorBackends:
    """What ``glm5next doctor`` shows of one operator.

    Attributes:
        operator: its name.
        chosen: the backend that a call would use now.
        available: every backend that can be chosen, the reference first.
    """

    operator: str
    chosen: str
    available: tuple[str, ...]


_operators: dict[str, Operator] = {}
_backends: dict[tuple[str, str], _Backend] = {}
_chosen: dict[str, str] = {}
_plugins_loaded = False


class Operator[**P, R]:
    """A named operator; calling it runs the chosen backend with the same arguments.

    Args:
        name: what the operator is called in choices, registrations and messages.
        reference: the torch implementation, which specifies it; its docstring is the operator's.
        check: called with the arguments before any backend; raises if their shapes or dtypes are wrong. Looks at
            metadata only.
    """

    def __init__(self, name: str, reference: Callable[P, R], check: Callable[..., None] | None = None):
        if name in _operators:
            raise ValueError(f"operator {name!r} exists already")
        functools.update_wrapper(self, reference)
        self.name = name
        self.reference = reference
        self._check = check
        self._loaded: dict[str, Callable[P, R]] = {REFERENCE: reference}
        _operators[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._check is not None:
            self._check(*args, **kwargs)
        name = chosen_backend(self.name)
        if name != REFERENCE:
            self._require_support(name, args, kwargs)
        return self._implementation(name)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator {self.name}, backend {chosen_backend(self.name)}>"

    def _require_support(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        supports = _backend(self.name, name).supports
        reason = supports(*args, **kwargs) if supports is not None else None
        if reason is not None:
            raise BackendError(
                f"backend {name!r} of operator {self.name!r} does not support this call: {reason}; choose another for "
                f"it ({ENVIRONMENT_VARIABLE}={self.name}={REFERENCE})"
            )

    def _implementation(self, name: str) -> Callable[P, R]:
        if name not in self._loaded:
            try:
                self._loaded[name] = _backend(self.name, name).loader()
            except ImportError as error:
                raise BackendError(
                    f"backend {name!r} of operator {self.name!r} cannot be loaded: {error}; install what it needs or "
                    f"choose another ({ENVIRONMENT_VARIABLE}={self.name}={REFERENCE})"
                ) from error
        return self._loaded[name]


def register_backend(
    operator_name: str,
    backend_name: str,
    loader: Callable[[], Callable[..., Any]],
    *,
    supports: Callable[..., str | None] | None = None,
) -> None:
    """Offer an implementation of an operator. It runs only where it is chosen by name.

    Args:
        operator_name: an operator of :mod:`glm5next_plugin.ops`.
        backend_name: how users choose it; letters, digits, ``_``, ``-`` and ``.``.
        loader: called once, on first use, without arguments; imports what it needs and returns a callable with the
            signature, shapes and dtypes of the operator's reference.
        supports: called with an operator call's arguments before it; returns ``None`` if the backend can compute it,
            else the reason why not. Must not synchronise with the device. Left out: everything is supported.

    Raises:
        BackendError: no such operator, an unusable name, or the operator has a backend of this name.
    """
    _require_operator(operator_name)
    if not backend_name.replace("_", "").replace("-", "").replace(".", "").isalnum() or backend_name == REFERENCE:
        raise BackendError(
            f"backend name {backend_name!r} for operator {operator_name!r}; needed: letters, digits, '_', '-' or '.', "
            f"other than {REFERENCE!r}"
        )
    if (operator_name, backend_name) in _backends:
        raise BackendError(f"operator {operator_name!r} has a backend {backend_name!r} already; needed: another name")
    _backends[operator_name, backend_name] = _Backend(loader, supports)


def set_backend(operator_name: str, backend_name: str | None) -> None:
    """Choose the backend of an operator in this process; ``None`` takes the choice back.

    Raises:
        BackendError: no such operator, or it has no backend of this name.
    """
    _require_operator(operator_name)
    if backend_name is None:
        _chosen.pop(operator_name, None)
        return
    if backend_name != REFERENCE:
        _backend(operator_name, backend_name)
    _chosen[operator_name] = backend_name


def chosen_backend(operator_name: str) -> str:
    """Name of the backend that a call of the operator uses now.

    Raises:
        BackendError: no such operator, or the environment variable cannot be understood.
    """
    _require_operator(operator_name)
    if operator_name in _chosen:
        return _chosen[operator_name]
    return _parse_choices(os.environ.get(ENVIRONMENT_VARIABLE, "")).get(operator_name, REFERENCE)


def describe_backends() -> list[OperatorBackends]:
    """Every operator with its backends, by name. Loads the plugins.

    Raises:
        BackendError: the environment names an operator or a backend that does not exist.
    """
    _load_plugins()
    described = []
    for operator in sorted(_operators):
        chosen = chosen_backend(operator)
        if chosen != REFERENCE:
            _backend(operator, chosen)
        described.append(OperatorBackends(operator, chosen, _available(operator)))
    return described


@functools.lru_cache
def _parse_choices(text: str) -> Mapping[str, str]:
    choices: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        operator, separator, backend = (part.strip() for part in entry.partition("="))
        if not separator or not operator or not backend:
            raise BackendError(f"{ENVIRONMENT_VARIABLE} has {entry!r}; needed: operator=backend, separated by commas")
        if operator in choices:
            raise BackendError(f"{ENVIRONMENT_VARIABLE} names operator {operator!r} twice")
        try:
            _require_operator(operator)
        except BackendError as error:
            raise BackendError(f"{ENVIRONMENT_VARIABLE}: {error}") from error
        choices[operator] = backend
    return MappingProxyType(choices)


def _require_operator(name: str) -> None:
    if name not in _operators:
        raise BackendError(f"no operator {name!r}; there are {', '.join(sorted(_operators))}")


def _available(operator_name: str) -> tuple[str, ...]:
    return REFERENCE, *sorted(backend for owner, backend in _backends if owner == operator_name)


def _backend(operator_name: str, backend_name: str) -> _Backend:
    if (operator_name, backend_name) not in _backends:
        _load_plugins()
    try:
        return _backends[operator_name, backend_name]
    except KeyError:
        available = ", ".join(_available(operator_name))
        raise BackendError(
            f"operator {operator_name!r} has no backend {backend_name!r}; there are {available}"
        ) from None


def _load_plugins() -> None:
    global _plugins_loaded
    if not _plugins_loaded:
        from glm5next_plugin import plugins

        plugins.register_kernels(register_backend)
        # only now: a plugin that fails is an error each time, not just the first
        _plugins_loaded = True
