"""``glm5next``: the application, and what becomes of errors.

Exit codes: 0 done, 1 unhealthy or unequal, 2 bad input or setting, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import glm5next_plugin
from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.errors import InputError, PluginError

# Subcommand -> its line in `glm5next --help`. Module glm5next_plugin.cli.<name> defines the function <name>.
COMMANDS = {
    "bringup": "Show that a set-up works: checkpoint in, RL steps, checkpoint out, every figure in its range.",
    "convert": "Convert a checkpoint between the released format and Megatron's torch_dist, BF16 and FP8.",
    "doctor": "Show versions, adapters and kernels: found, needed, and what to install.",
    "inspect": "Show what is in a checkpoint, and what is missing or wrong, from its headers.",
    "plan": "Choose parallel sizes for a cluster, and show what every rank holds.",
    "slice": "Make a checkpoint of some layers of another.",
    "verify": "Compare two checkpoints tensor by tensor, across formats, spellings and dtypes.",
}

# What the user can mend; anything else is a fault of ours and keeps its traceback.
_USER_ERRORS = (
    InputError,
    ConfigError,
    PluginError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


class _LazyGroup(TyperGroup):
    """Lists subcommands from :data:`COMMANDS`; imports a module only to run it or show its own help."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands.update({name: TyperCommand(name, help=line) for name, line in COMMANDS.items()})

    def resolve_command(self, ctx: typer.Context, args: list[str]):
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name is not None else command, rest

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except _USER_ERRORS as error:
            print(f"glm5next: error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from error


def load_command(name: str):
    """Import subcommand ``name`` and build it from its function's signature."""
    module = importlib.import_module(f"glm5next_plugin.cli.{name}")
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name)(getattr(module, name))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup,
    name="glm5next",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Examples[/bold]\n\n"
    "[cyan]glm5next doctor[/cyan]  what is installed and what is missing\n\n"
    "[cyan]glm5next bringup[/cyan]  the whole job on a CPU, with a report\n\n"
    "[cyan]glm5next COMMAND --help[/cyan]  options and examples of one command",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"glm5next-plugin {glm5next_plugin.__version__}")
        raise typer.Exit()


@app.callback()
def _glm5next(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GLM-5.3-Flash (glm5_next) in stock Megatron, SGLang, verl and miles.

    Exit codes: 0 done, 1 unhealthy or unequal, 2 bad input or setting, 130 interrupted.
    """
