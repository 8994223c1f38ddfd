"""Output of the command: summaries, tables, and a line while PyTorch loads."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fedloom.utils.formatting import format_bytes, format_percent, format_plural, format_seconds
from fedloom.utils.result_window import count_evaluations

if TYPE_CHECKING:  # so that `fedloom --help` does not load numpy
    from fedloom.report import GridEffects
    from fedloom.runs.compare import ComparisonResult


@contextmanager
def show_loading(quiet: bool = False) -> Iterator[None]:
    """Show on stderr that PyTorch is loading, and wipe the line after the block. Without a terminal, show nothing."""
    shown = not quiet and "torch" not in sys.modules and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print("loading PyTorch ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def print_run_summary(run_result: Any, as_json: bool) -> None:
    """Print the summary of a run, as text or as one line of JSON."""
    if as_json:
        print(json.dumps(run_result.summary))
        return
    summary = run_result.summary
    for name, text in _result_lines(summary, run_result.config):
        print(f"{name:<10}{text}")
    lines = [
        ("sent", f"{format_bytes(summary['bytes_down'])} down, {format_bytes(summary['bytes_up'])} up"),
        ("time", format_seconds(summary["seconds"])),
        ("run", summary["run"]),
        ("report", str(run_result.path / "report.html")),
        ("digest", summary["digest"]),
    ]
    if "epsilon" in summary:
        lines.insert(-3, ("privacy", _privacy(summary, run_result.config.noise_source)))
    if summary["failed"]:
        lines.insert(1, ("failed", f"{summary['failed']} client tasks, see the report"))
    for name, text in lines:
        print(f"{name:<10}{text}")


def _result_lines(summary: Mapping[str, Any], config: Any) -> list[tuple[str, str]]:
    """Return the result: means over the window, and the last evaluation if the window holds more than one."""
    window = summary["window"]
    if not window:
        return [("result", "none: there are no test data")]
    basis = f"mean of the last {window} of {count_evaluations(config.rounds, config.eval_every)} evaluations"
    has_global_model = "global_model" not in summary
    untested = summary["last_accuracy"] is summary["last_loss"] is None
    if has_global_model and untested and summary.get("held_out_scored"):
        return [("result", "none: there are no common test data"), *_held_out_line(summary)]
    first, *last = _global_model_lines(summary, basis) if has_global_model else [("averages", basis)]
    lines = [first] if has_global_model or window > 1 else []
    for name, kind, whose in (("own", "personal", " with the clients' own models"), ("clients", "client", "")):
        if (average := summary[f"{kind}_accuracy_mean"]) is not None:
            worst = format_percent(summary[f"{kind}_accuracy_worst10"])
            lines.append((name, f"{format_percent(average)} on average{whose}, {worst} for the worst tenth"))
    return [*lines, *_held_out_line(summary), *last]


def _global_model_lines(summary: Mapping[str, Any], basis: str) -> list[tuple[str, str]]:
    """Return the result of the global model, and its last evaluation if the window holds more than one."""
    last = f"after round {summary['rounds']}"
    if summary["last_accuracy"] is None:  # a regression
        name, mean, deviation = "loss", _loss(summary["loss"]), _loss(summary["loss_std"])
        end = f"{_loss(summary['last_loss'])} {last}"
    else:
        name, mean, deviation = "accuracy", format_percent(summary["accuracy"]), format_percent(summary["accuracy_std"])
        end = f"{format_percent(summary['last_accuracy'])} {last} (loss {_loss(summary['last_loss'])})"
    if summary["window"] == 1:
        return [(name, end.replace(last, f"on test data {last}"))]
    return [(name, f"{mean} on test data, {basis} (sd {deviation})"), ("last", end)]


def _held_out_line(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the accuracy for the held-out clients, if there are any."""
    average = summary.get("held_out_accuracy_mean")
    if average is None:
        return []
    count, worst = summary["held_out_scored"], format_percent(summary["held_out_accuracy_worst10"])
    whose = f"on average for {format_plural(count, 'client')} that never trained"
    return [("held out", f"{format_percent(average)} {whose}, {worst} for the worst tenth")]


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


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


def print_comparison(result: "ComparisonResult", as_json: bool) -> None:
    """Print the table of a comparison, its protocol, effects and conclusion, as text or as one line of JSON."""
    from fedloom.report.protocol import collect_protocols, protocol_rows

    if as_json:
        runs = [finished.summary for finished in result.runs]
        table = result.table
        found = {"path": str(result.path), "headline": table.headline, "result": table.basis, "runs": runs}
        found["protocol"] = collect_protocols(table.groups)
        print(json.dumps(found | ({"grid": result.effects.to_dict()} if result.effects else {})))
        return
    print_table(*result.table.table("brief"))
    print(result.table.caption)
    print("\nProtocol")
    for title, text in protocol_rows(result.table.groups):
        print(f"  {title}: {text}")
    if result.effects:
        _print_effects(result.effects)
    print(f"\n{result.table.headline}")
    for note in result.table.notes:
        print(note)
    print(f"report: {result.path / 'report.html'}")


def _print_effects(effects: "GridEffects") -> None:
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
