"""Finds the plugins of entry-point group ``glm5next.adapters`` and calls their hooks, one plugin at a time.

A plugin that cannot be imported does not take the others with it: it is kept in :attr:`Registry.failures`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import pluggy

from glm5next_plugin import hookspecs, versions
from glm5next_plugin.errors import PluginError

ENTRY_POINT_GROUP = "glm5next.adapters"

logger = logging.getLogger(__name__)


class Registry:
    """Loaded plugins by name.

    Attributes:
        failures: plugin name -> why it could not be loaded.
        distributions: plugin name -> the installed distribution that offers it, with its version.
    """

    def __init__(self) -> None:
        self.failures: dict[str, PluginError] = {}
        self.distributions: dict[str, str] = {}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    def load_entry_points(self) -> None:
        """Import and register every plugin of the installed distributions."""
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            if entry_point.dist is not None:
                self.distributions[entry_point.name] = f"{entry_point.dist.name} {entry_point.dist.version}"
            try:
                self.register(entry_point.name, entry_point.load())
            except PluginError as error:
                self.failures[entry_point.name] = error
            except (Exception, SystemExit) as error:  # the others must still load
                self.failures[entry_point.name] = PluginError(
                    entry_point.name, f"cannot import {entry_point.value}: {type(error).__name__}: {error}"
                )

    def register(self, name: str, plugin: Any) -> None:
        """Add a plugin object.

        Raises:
            PluginError: the name is taken, or a function marked as a hook is none of :mod:`hookspecs`.
        """
        if self._manager.has_plugin(name):
            raise PluginError(name, "the name is taken by another installed distribution; uninstall one of the two")
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            raise PluginError(name, " ".join(str(error).split())) from error

    def names(self) -> list[str]:
        """Names of the loaded plugins, sorted."""
        return sorted(name for name, _ in self._manager.list_name_plugin())

    def call(self, name: str, hook: str, **arguments: Any) -> Any:
        """Call one hook of one plugin; ``None`` if the plugin does not have it.

        Raises:
            PluginError: no such plugin, it could not be loaded, or the hook raised.
        """
        if name in self.failures:
            raise self.failures[name]
        if not self._manager.has_plugin(name):
            raise PluginError(name, f"not installed; installed are {self.names()}")
        implementations = [i for i in getattr(self._manager.hook, hook).get_hookimpls() if i.plugin_name == name]
        if not implementations:
            return None
        [implementation] = implementations
        try:
            return implementation.function(*(arguments[argument] for argument in implementation.argnames))
        except (Exception, SystemExit) as error:
            raise PluginError(name, f"{hook} raised {type(error).__name__}: {error}") from error


@functools.cache
def registry() -> Registry:
    """The plugins of this process, loaded on first use."""
    found = Registry()
    found.load_entry_points()
    return found


def register_kernels(register: Callable[..., Any]) -> None:
    """Let every plugin offer its operator backends to ``register``.

    A plugin that could not be loaded is logged, not fatal: a backend is used only where it is chosen by name, and
    choosing one that nobody registered is an error.

    Raises:
        PluginError: a plugin's hook raised.
    """
    plugins = registry()
    for failure in plugins.failures.values():
        logger.warning("%s; its kernels are not available", failure)
    for name in plugins.names():
        plugins.call(name, "glm5next_register_kernels", register=register)


def install(name: str) -> None:
    """Make one framework know the model, after its versions were found good.

    Raises:
        VersionError: a required distribution is absent or outside the supported range.
        PluginError: no such plugin, or one of its hooks raised.
    """
    plugins = registry()
    description = plugins.call(name, "glm5next_describe")
    if description is not None:
        versions.require(description.requires, extra=description.extra)
    plugins.call(name, "glm5next_install")
