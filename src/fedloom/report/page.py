"""One self-contained page about one run or many: no network, no server, light and dark, wide and narrow."""

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fedloom.errors import InputError
from fedloom.report.comparison_table import ComparisonTable, make_comparison_table
from fedloom.report.effects import EffectGrid, analyze_effects
from fedloom.report.figures import MOST_DIAGNOSTICS, Data, collect_figure_data, heat_map_figure_data
from fedloom.report.images import render_synthetic_images
from fedloom.report.records import RunRecord
from fedloom.report.sections import (
    SectionHtml,
    _choice,
    join_section_html,
    render_costs_section,
    render_durations_section,
    render_effects_section,
    render_failures_section,
    render_initial_weights_section,
    render_partition_section,
    render_results_section,
    render_runs_section,
    render_section,
    render_section_tag,
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
) -> None:
    """Write the report of `records` to `path`: whole or, if anything goes wrong, not at all.

    If they are the runs of a `grid`, the page also says which part helped how much.
    """
    path = Path(path)
    if grid:  # so that the baselines come first, in whatever order folders were read
        order = {method: at for at, method in enumerate(grid.methods)}
        records = sorted(records, key=lambda record: order.get(record.method, len(order)))
    write_html_page(path, _render_report(make_comparison_table(records, target), title, grid))


def write_html_page(path: Path, page: str) -> None:
    """Write a page: whole or, if anything goes wrong, not at all. What is there and is no page is left alone."""
    name = ""
    try:
        if path.is_file() and path.stat().st_size and not _is_page(path):
            raise InputError(f"{str(path)!r} is there already and is no page; choose another file.")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        Path(name).chmod(0o644)  # mkstemp lets nobody else read; a report is there to be shown
        Path(name).replace(path)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        raise InputError(f"the report cannot be written to {str(path)!r}: {error.strerror}.") from None


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(DOCTYPE)).lower() == DOCTYPE.encode()


def _render_report(comparison: ComparisonTable, title: str | None = None, grid: EffectGrid | None = None) -> str:
    """The page as text."""
    groups = comparison.groups
    data = collect_figure_data(groups)
    effects = analyze_effects(grid, groups) if grid else None
    if effects and effects.scores:
        data["grid"] = heat_map_figure_data(effects)
    title = title or _title(comparison, grid)
    count = sum(len(group.members) for group in groups)
    tasks = data["tasks"][0] if len(data["tasks"]) == 1 else format_plural(len(data["tasks"]), "task")
    notes = [render_section_tag("li", note) for note in comparison.notes]
    header = render_section_tag(
        "header",
        render_section_tag("p", f"fedloom · {format_plural(count, 'run')} · {tasks}", class_="eyebrow"),
        render_section_tag("h1", title),
        *(render_section_tag("p", said, class_="lead") for said in comparison.headlines),
        render_section_tag("ul", *notes, class_="notes") if notes else "",
    )
    body = [
        header,
        render_effects_section(effects) if effects else "",
        render_results_section(comparison),
        _curves(data),
        render_costs_section(comparison),
        render_durations_section(groups),
        render_partition_section(data),
        _diagnostics(data),
        render_synthetic_images(groups),
        render_failures_section(groups),
        render_settings_section(groups),
        render_initial_weights_section(groups),
        render_runs_section(groups),
    ]
    return build_html_page(title, body, data)


def build_html_page(title: str, body: Sequence[str], data: Data) -> SectionHtml:
    """A page with this body, and the figures that the script draws from the data."""
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), _asset("report.js")]
    body = [
        *body,
        render_section_tag("script", SectionHtml(_inert(data)), type="application/json", id="data"),
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
    methods = list(dict.fromkeys(group.runs[0].method for group in comparison.groups))
    data = {str(group.runs[0].config.get("data", "")) for group in comparison.groups} - {""}
    what = (
        " × ".join(format_plural(len(one.levels), one.name) for one in grid.factors) if grid else format_list(methods)
    )
    return what + (f" on {format_list(sorted(data))}" if data else "")


def _curves(data: Data) -> SectionHtml:
    if not data["curves"]:
        return SectionHtml("")
    several = any(seeds > 1 for curve in data["curves"] for line in curve["lines"] for seeds in line["seeds"])
    hint = "Line: mean over seeds. Band: lowest to highest seed." if several else "A single seed, so no band."
    return render_section(
        "Learning curves",
        hint,
        render_section_tag("div", *(_choice(f"choose-{what}") for what in ("y", "x", "task")), class_="choices"),
        render_section_tag("div", id="legend", class_="legend"),
        render_section_tag(
            "div", id="curves", role="img", aria_label="Learning curves; the table above has the numbers."
        ),
    )


def _diagnostics(data: Data) -> SectionHtml:
    if not data["diagnostics"]:
        return SectionHtml("")
    cut = len(data["diagnostics"]) == MOST_DIAGNOSTICS
    hint = "By round, mean over seeds." + (f" The first {MOST_DIAGNOSTICS}." if cut else "")
    return render_section("Diagnostics", hint, render_section_tag("div", id="diagnostics", class_="smalls"))


def _asset(name: str) -> str:
    return resources.files("fedloom.report").joinpath(name).read_text(encoding="utf-8")


def _inert(data: Data) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str]) -> str:
    """The browser may run these scripts and no other, and may fetch nothing, whatever a run's files hold."""
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
