"""The ``glm5next`` command: one file a subcommand, imported only when it is called."""
