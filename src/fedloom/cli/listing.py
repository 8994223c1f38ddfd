"""`fedloom list`: the methods, data sets, networks and partitions."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from fedloom.cli.catalog import KINDS, read_catalog_entries
from fedloom.cli.options import Imports, Json
from fedloom.cli.output import print_table
from fedloom.errors import unknown_name_error


def list_(
    what: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="kind of thing to list")],
    json_: Json = False,
    import_: Imports = None,
) -> None:
    """List the methods with their options, the data sets, the networks or the partitions."""
    if what not in KINDS:
        raise unknown_name_error("kind of thing to list", what, KINDS)
    entries = read_catalog_entries(what, import_ or ())
    if json_:
        print(json.dumps(entries))
        return
    if what == "methods":
        _print_methods(entries)
    else:
        titles = [title for title in entries[0] if title not in ("options", "found", "missing", "get")]
        print_table(titles, [[_cell(entry[title]) for title in titles] for entry in entries])
    if what == "models":
        print("\nAdd MOON's projection before the last layer of any network: --model NAME+projection")
    for entry in entries:
        if entry.get("missing"):
            print(f"\n{entry['name']} is read without {', '.join(entry['missing'])}.")
        if entry.get("get"):
            print(f"\n{entry['name']} must be downloaded by hand: {entry['get']}.")
    if "options" in entries[0]:
        form, dot = ("--set METHOD.OPTION=VALUE", ".") if what == "methods" else ("--model NAME:OPTION=VALUE,...", ":")
        print(f"\nOptions ({form}):")
        lines = [
            [f"{entry['name']}{dot}{option['name']}", _cell(option["default"]), option["help"]]
            for entry in entries
            for option in entry["options"]
        ]
        print_table(["option", "default", "meaning"], lines, width=100)


def _print_methods(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print what the methods do and what they cost."""
    about = [[entry["name"], str(entry["year"] or ""), entry["summary"]] for entry in entries]
    print_table(["name", "year", "summary"], about, width=100)
    print("\nWhat they cost: models sent in a round of K of the N clients, and data on the server:")
    keys = ["models a round", "client state", "server state", "extra compute", "server data"]
    costs = [[entry["name"], ", ".join(entry["provides"]), *(entry[key] for key in keys)] for entry in entries]
    print_table(["name", "provides", "models", *keys[1:4], "data"], costs, width=100)


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) if value and isinstance(value[0], int) else ", ".join(map(str, value))
    return (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "" if value is None else str(value)
    )
