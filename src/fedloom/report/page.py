"""The self-contained HTML report of one or many runs.

It loads nothing from the network.
"""

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fedloom.errors import InputError
from fedloom.report.comparison_record import render_comparison_command
from fedloom.report.comparison_table import ComparisonTable, make_comparison_table
from fedloom.report.effects import EffectGrid, analyze_effects
from fedloom.report.figures import Data, collect_figure_data, heat_map_figure_data
from fedloom.report.images import render_synthetic_images
from fedloom.report.markup import SectionHtml, join_section_html, render_section_tag
from fedloom.report.records import RunRecord
from fedloom.report.sections import (
    render_costs_section,
    render_curves_section,
    render_diagnostics_section,
    render_durations_section,
    render_effects_section,
    render_failures_section,
    render_initial_weights_section,
    render_partition_section,
    render_protocol_section,
    render_results_section,
    render_runs_section,
    render_settings_section,
)
from fedloom.utils.formatting import format_list, format_plural

DOCTYPE = "<!doctype html>"


def write_report_page(
    records: Sequence[RunRecord],
    path: Path,
    *,
    title: str | None = None,
    target: float | None = None,
    grid: EffectGrid | None = None,
    window: int | None = None,
    command: str | None = None,
) -> None:
    """Write the report of `records` to `path`, completely or not at all.

    For the runs of a `grid`, the page also shows the effect of each part. `window` replaces the setting of the runs:
    how many of the last evaluations are averaged. `command` repeats all of them.
    """
    path = Path(path)
    if grid:  # baselines come first, in whatever order the directories were read
        order = {method: at for at, method in enumerate(grid.methods)}
        records = sorted(records, key=lambda record: order.get(record.label, len(order)))
    write_html_page(path, _render_report(make_comparison_table(records, target, window), title, grid, command))


def write_html_page(path: Path, html: str) -> None:
    """Write a page, completely or not at all. A file that is not an HTML page is never overwritten."""
    name = ""
    try:
        if path.is_file() and path.stat().st_size and not _is_page(path):
            raise InputError(f"{str(path)!r} already exists and is not an HTML page; choose another file.")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(html)
        Path(name).chmod(0o644)  # mkstemp creates files that only their owner can read
        Path(name).replace(path)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise InputError(f"the report cannot be written to {str(path)!r}: {error.strerror}.") from None


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(DOCTYPE)).lower() == DOCTYPE.encode()


def _render_report(
    comparison: ComparisonTable, title: str | None = None, grid: EffectGrid | None = None, command: str | None = None
) -> str:
    """Return the page as HTML."""
    groups = comparison.groups
    figure_data = collect_figure_data(groups)
    effects = analyze_effects(grid, groups) if grid else None
    if effects and effects.scores:
        figure_data["grid"] = heat_map_figure_data(effects)
    title = title or _title(comparison, grid)
    if command is None and len(groups) == len(groups[0].records) == 1:
        command = groups[0].runs[0].config.get("command")
    count = sum(len(group.records) for group in groups)
    tasks = (
        figure_data["tasks"][0] if len(figure_data["tasks"]) == 1 else format_plural(len(figure_data["tasks"]), "task")
    )
    notes = [render_section_tag("li", note) for note in comparison.notes]
    header = render_section_tag(
        "header",
        render_section_tag("p", f"fedloom · {format_plural(count, 'run')} · {tasks}", class_="eyebrow"),
        render_section_tag("h1", title),
        *(render_section_tag("p", said, class_="lead") for said in comparison.headlines),
        render_section_tag("ul", *notes, class_="notes") if notes else "",
        render_comparison_command([command]) if command else "",
    )
    body = [
        header,
        render_effects_section(effects, comparison.basis) if effects else "",
        render_results_section(comparison),
        render_protocol_section(groups),
        render_curves_section(figure_data),
        render_costs_section(comparison),
        render_durations_section(groups),
        render_partition_section(figure_data),
        render_diagnostics_section(figure_data),
        render_synthetic_images(groups),
        render_failures_section(groups),
        render_settings_section(groups),
        render_initial_weights_section(groups),
        render_runs_section(groups),
    ]
    return build_html_page(title, body, figure_data)


def build_html_page(title: str, body: Sequence[str], figure_data: Data) -> SectionHtml:
    """Return a page with this body, the data of its plots and the scripts that draw them."""
    scripts = [_asset("vendor/plotly-basic.min.js"), _asset("report.js")]
    body = [
        *body,
        render_section_tag("script", SectionHtml(_inert(figure_data)), type="application/json", id="data"),
        *(render_section_tag("script", SectionHtml(script)) for script in scripts),
    ]
    head = [
        SectionHtml('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        SectionHtml(f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">'),
        render_section_tag("title", title),
        render_section_tag("style", SectionHtml(_asset("style.css"))),
    ]
    return join_section_html(
        SectionHtml(f"{DOCTYPE}\n"),
        render_section_tag("html", render_section_tag("head", *head), render_section_tag("body", *body), lang="en"),
    )


def _title(comparison: ComparisonTable, grid: EffectGrid | None) -> str:
    methods = list(dict.fromkeys(group.runs[0].label for group in comparison.groups))
    data = {str(group.runs[0].config.get("data", "")) for group in comparison.groups} - {""}
    what = (
        " × ".join(format_plural(len(one.levels), one.name) for one in grid.factors) if grid else format_list(methods)
    )
    return what + (f" on {format_list(sorted(data))}" if data else "")


def _asset(name: str) -> str:
    return resources.files("fedloom.report").joinpath(name).read_text(encoding="utf-8")


def _inert(figure_data: Data) -> str:
    """Return JSON that cannot close its script element."""
    text = json.dumps(figure_data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy: run only these scripts and fetch nothing, whatever a run contains."""
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
