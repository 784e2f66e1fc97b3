"""``glm5next doctor``: the diagnosis as tables or JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glm5next_plugin.diagnosis import Diagnosis, diagnose

_COLOURS = {
    "ok": "green",
    "ready": "green",
    "native": "green",
    "hooked": "green",
    "absent": "dim",
    "limited": "yellow",
    "missing": "yellow",
    "wrong": "red",
    "broken": "red",
    "error": "red",
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as one JSON object.")] = False,
) -> None:
    """Show what is installed, which adapters can load and why not, and what to install.

    Exit code 0: nothing that is installed is broken (frameworks that are absent do not count). 1: something is.

    [bold]Examples[/bold]

    [cyan]glm5next doctor[/cyan]  tables for a person

    [cyan]glm5next doctor --json | jq .faults[/cyan]  for a script
    """
    diagnosis = diagnose()
    if as_json:
        print(json.dumps({"healthy": diagnosis.healthy, **dataclasses.asdict(diagnosis)}, indent=2))
    else:
        _show(diagnosis, Console())
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    versions = _table("Versions", "", "found", "needed", "state", "why")
    for row in diagnosis.versions:
        versions.add_row(row.distribution, row.found or "-", row.needed, _state(row.state), escape(row.why))
    console.print(versions)

    adapters = _table("Adapters", "", "offered by", "state", "detail")
    for row in diagnosis.adapters:
        adapters.add_row(escape(row.name), escape(row.offered_by), _state(row.state), escape(row.detail))
    console.print(adapters)

    for row in diagnosis.adapters:
        if row.checks:
            seams = _table(f"Seams of {row.name}", "", "state", "detail")
            for check in row.checks:
                seams.add_row(escape(check.name), _state(check.status), escape(check.detail))
            console.print(seams)

    operators = _table("Operators", "", "runs on", "can run on")
    for row in diagnosis.operators:
        operators.add_row(row.operator, escape(row.chosen), escape(", ".join(row.available)))
    console.print(operators)

    absent = dict.fromkeys(row.extra for row in diagnosis.versions if row.state == "absent")
    if absent:
        extras = ", ".join(f"glm5next-plugin[{extra}]" for extra in absent)
        console.print(escape(f"Not installed; if you want it, install the extra: {extras}"))
    for fault in diagnosis.faults:
        console.print(f"[red]broken:[/red] {escape(fault)}")
    if diagnosis.healthy:
        console.print("[green]Nothing that is installed is broken.[/green]")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state(state: str) -> str:
    return f"[{_COLOURS[state]}]{state}[/]"
