"""Tables on the terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # `fedloom --help` need not wait for numpy
    from fedloom.report import Effects

MOST_PAIRS = 10
"""How many pairs of a grid are shown."""


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int = 200) -> None:
    """Print rows under their titles: as wide as the terminal, or `width` characters where there is none."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else width, markup=False).print(table)


def print_methods(entries: Sequence[Mapping[str, Any]]) -> None:
    """What the methods do, and what they cost."""
    about = [[entry["name"], str(entry["year"] or ""), entry["summary"]] for entry in entries]
    print_table(["name", "year", "summary"], about, width=100)
    print("\nWhat they cost: models sent in a round of K of the N clients, and data on the server:")
    keys = ["models a round", "client keeps", "server keeps", "extra compute", "server data"]
    costs = [[entry["name"], ", ".join(entry["brings"]), *(entry[key] for key in keys)] for entry in entries]
    print_table(["name", "brings", "models", *keys[1:4], "data"], costs, width=100)


def print_effects(effects: "Effects") -> None:
    """Which part of a grid helped how much, and what was left out."""
    if effects.effects:
        print("\nWhat each part did")
        print_table(*effects.effect_table())
    if effects.pairs:
        print(f"\nThe best pairs{f', {MOST_PAIRS} of {len(effects.pairs)}' if len(effects.pairs) > MOST_PAIRS else ''}")
        print_table(*effects.pair_table(MOST_PAIRS))
    if effects.effects:
        print(f"\n{effects.sentence}\n{effects.footnote()}")
    for reason in effects.grid.refused.values():
        print(f"left out: {reason}")
