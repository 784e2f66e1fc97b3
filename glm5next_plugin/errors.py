"""Errors that a user can act on. The command line prints them as one line and exits with 2."""


class InputError(ValueError):
    """A bad input or setting; the message says what was found and what to do."""


class VersionError(InputError):
    """An installed distribution that is absent or outside the supported range."""


class PluginError(RuntimeError):
    """A plugin that cannot be loaded or whose hook failed; the message names it.

    Attributes:
        plugin: name of the entry point.
        reason: the message without the name.
    """

    def __init__(self, plugin: str, reason: str):
        self.plugin = plugin
        self.reason = reason
        super().__init__(f"plugin {plugin!r}: {reason}")
