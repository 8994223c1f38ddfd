"""Output of the command: the summary of a run, and tables on the terminal."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fedloom.utils.formatting import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:  # so that `fedloom --help` does not load numpy
    from fedloom.report import GridEffects


def print_run_summary(run_result: Any, as_json: bool) -> None:
    """Print the summary of a run, as text or as one line of JSON."""
    if as_json:
        print(json.dumps(run_result.summary))
        return
    summary = run_result.summary
    loss = "–" if summary["loss"] is None else f"{summary['loss']:.4f}"
    lines = [
        (
            "accuracy",
            f"{format_percent(summary['accuracy'])} on test data after round {summary['rounds']} (loss {loss})",
        ),
        ("clients", f"{format_percent(summary['client_accuracy_mean'])} on average, "
                    f"{format_percent(summary['client_accuracy_worst10'])} for the worst tenth"),
        ("sent", f"{format_bytes(summary['bytes_down'])} down, {format_bytes(summary['bytes_up'])} up"),
        ("time", format_seconds(summary["seconds"])),
        ("run", summary["run"]),
        ("report", str(run_result.path / "report.html")),
        ("digest", summary["digest"]),
    ]  # fmt: skip
    if summary["client_accuracy_mean"] is None:
        del lines[1]
    if "epsilon" in summary:
        lines.insert(-3, ("privacy", _privacy(summary, run_result.config.noise_source)))
    if summary["failed"]:
        lines.insert(3, ("failed", f"{summary['failed']} client tasks, see the report"))
    if summary.get("personal_accuracy_mean") is not None:
        own, worst = (
            format_percent(summary["personal_accuracy_mean"]),
            format_percent(summary["personal_accuracy_worst10"]),
        )
        lines.insert(1, ("own", f"{own} on average with the clients' own models, {worst} for the worst tenth"))
    for name, text in lines:
        print(f"{name:<10}{text}")


def _privacy(summary: Mapping[str, Any], source: str) -> str:
    """Format the privacy spent."""
    if summary["epsilon"] is None:
        return "none guaranteed: updates were clipped, but no noise was added"
    spent = f"epsilon {summary['epsilon']:.2f} at delta {summary['delta']:.2g}, for one client more or less"
    return f"{spent} (simulated: the noise is the seed's)" if source == "seed" else spent


MOST_PAIRS = 10
"""Pairs of a grid to print."""


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int = 200) -> None:
    """Print rows under their titles, as wide as the terminal, or `width` characters without one."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else width, markup=False).print(table)


def print_effects(effects: "GridEffects") -> None:
    """Print the effect of each part of a grid, and the combinations left out."""
    if effects.effects:
        print("\nEffect of each part")
        print_table(*effects.effect_table())
    if effects.pairs:
        print(f"\nThe best pairs{f', {MOST_PAIRS} of {len(effects.pairs)}' if len(effects.pairs) > MOST_PAIRS else ''}")
        print_table(*effects.pair_table(MOST_PAIRS))
    if effects.effects:
        print(f"\n{effects.sentence}\n{effects.footnote()}")
    for reason in effects.grid.refused.values():
        print(f"left out: {reason}")
