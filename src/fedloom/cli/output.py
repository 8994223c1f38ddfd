"""Output of the command: listings as plain data, the summary of a run, and tables on the terminal."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fedloom.utils.formatting import format_bytes, format_percent, format_seconds
from fedloom.utils.result_window import count_evaluations

if TYPE_CHECKING:  # so that `fedloom --help` does not load numpy
    from fedloom.report import GridEffects
    from fedloom.runs.compare import ComparisonResult


def _list_methods() -> list[dict[str, Any]]:
    """List the methods with their parts, costs and options."""
    from fedloom.methods import methods

    return [
        {
            "name": method.name,
            "provides": list(method.parts),
            "year": method.year,
            "summary": method.summary,
            "models a round": method.models_sent,
            "client state": method.client_state,
            "server state": method.server_state,
            "extra compute": method.extra_compute,
            "server data": method.server_data or "no",
            "reference": method.reference,
            "options": [
                {"name": name, "default": field.default, "help": field.description}
                for name, field in method.options.model_fields.items()
            ],
        }
        for method in methods().values()
    ]


def _list_datasets() -> list[dict[str, Any]]:
    """List the data sets, and whether they are on this machine."""
    from fedloom.data.registry import available_datasets

    return [
        {
            "name": info.name,
            "summary": info.summary,
            "classes": info.classes,
            "shape": list(info.shape),
            "training": info.num_train_examples,
            "test": info.num_test_examples,
            "state": info.state,
            "found": str(info.folder) if info.folder else None,
            "missing": list(info.missing_parts),
            "get": info.manual_steps or None,
        }
        for info in available_datasets()
    ]


def _list_models() -> list[dict[str, Any]]:
    """List the networks with their sizes and options."""
    from fedloom.models import available_models

    return [
        {
            "name": info.name,
            "summary": info.summary,
            "parameters, 1 x 28 x 28": info.parameters_1x28x28,
            "parameters, 3 x 32 x 32": info.parameters_3x32x32,
            "parameters, text": info.parameters_text,
            "options": [
                {"name": option.name, "default": option.default, "help": option.help} for option in info.options
            ],
        }
        for info in available_models()
    ]


def _list_partitions() -> list[dict[str, Any]]:
    """List the partitions."""
    from fedloom.data.partitions import available_partitions

    return [{"name": info.spec, "summary": info.summary} for info in available_partitions()]


LISTINGS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": _list_methods,
    "datasets": _list_datasets,
    "models": _list_models,
    "partitions": _list_partitions,
}


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
    last = f"after round {summary['rounds']}"
    basis = f"mean of the last {window} of {count_evaluations(config.rounds, config.eval_every)} evaluations"
    if summary["last_accuracy"] is None:  # a regression, or a loss that overflowed
        deviation = "" if summary["loss_std"] is None else f" (sd {summary['loss_std']:.4f})"
        lines = [("loss", f"{_loss(summary['loss'])} on test data {last if window == 1 else ''}")]
        if window > 1:
            lines = [("loss", f"{_loss(summary['loss'])} on test data, {basis}{deviation}")]
            lines.append(("last", f"{_loss(summary['last_loss'])} {last}"))
        return lines
    accuracy = format_percent(summary["accuracy"])
    if window == 1:
        lines = [("accuracy", f"{accuracy} on test data {last} (loss {_loss(summary['loss'])})")]
    else:
        deviation = f" (sd {format_percent(summary['accuracy_std'])})"
        lines = [("accuracy", f"{accuracy} on test data, {basis}{deviation}")]
    for name, kind, whose in (("own", "personal", " with the clients' own models"), ("clients", "client", "")):
        if (mean := summary[f"{kind}_accuracy_mean"]) is not None:
            worst = format_percent(summary[f"{kind}_accuracy_worst10"])
            lines.append((name, f"{format_percent(mean)} on average{whose}, {worst} for the worst tenth"))
    if window > 1:
        said = f"{format_percent(summary['last_accuracy'])} {last} (loss {_loss(summary['last_loss'])})"
        lines.append(("last", said))
    return lines


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


def print_methods(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print what the methods do and what they cost."""
    about = [[entry["name"], str(entry["year"] or ""), entry["summary"]] for entry in entries]
    print_table(["name", "year", "summary"], about, width=100)
    print("\nWhat they cost: models sent in a round of K of the N clients, and data on the server:")
    keys = ["models a round", "client state", "server state", "extra compute", "server data"]
    costs = [[entry["name"], ", ".join(entry["provides"]), *(entry[key] for key in keys)] for entry in entries]
    print_table(["name", "provides", "models", *keys[1:4], "data"], costs, width=100)


def print_comparison(result: "ComparisonResult", as_json: bool) -> None:
    """Print the table of a comparison, its effects and its conclusion, as text or as one line of JSON."""
    if as_json:
        runs = [finished.summary for finished in result.runs]
        table = result.table
        found = {"path": str(result.path), "headline": table.headline, "result": table.basis, "runs": runs}
        print(json.dumps(found | ({"grid": result.effects.to_dict()} if result.effects else {})))
        return
    print_table(*result.table.table("brief"))
    print(result.table.caption)
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
