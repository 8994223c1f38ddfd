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
from fedloom.report.effects import analyse
from fedloom.report.figures import MOST_DIAGNOSTICS, MOST_PARTITIONS, Data, figures
from fedloom.report.grid import Grid
from fedloom.report.markup import Safe, join, tag
from fedloom.report.parts import heat_maps, parts
from fedloom.report.pictures import pictures
from fedloom.report.records import Record
from fedloom.report.sections import costs, durations, losses, results, runs, section, setup, starts
from fedloom.report.table import Comparison, compare
from fedloom.report.words import listed, plural

DOCTYPE = "<!doctype html>"


def write_report(
    records: Sequence[Record],
    path: Path,
    *,
    title: str | None = None,
    target: float | None = None,
    grid: Grid | None = None,
) -> None:
    """Write the report of `records` to `path`: whole or, if anything goes wrong, not at all.

    If they are the runs of a `grid`, the page also says which part helped how much.
    """
    path = Path(path)
    if grid:  # so that the baselines come first, in whatever order folders were read
        order = {method: at for at, method in enumerate(grid.methods)}
        records = sorted(records, key=lambda record: order.get(record.method, len(order)))
    write_page(path, render(compare(records, target), title, grid))


def write_page(path: Path, page: str) -> None:
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


def render(comparison: Comparison, title: str | None = None, grid: Grid | None = None) -> str:
    """The page as text."""
    groups = comparison.groups
    data = figures(groups)
    effects = analyse(grid, groups) if grid else None
    if effects and effects.scores:
        data["grid"] = heat_maps(effects)
    title = title or _title(comparison, grid)
    count = sum(len(group.members) for group in groups)
    tasks = data["tasks"][0] if len(data["tasks"]) == 1 else plural(len(data["tasks"]), "task")
    notes = [tag("li", note) for note in comparison.notes]
    header = tag(
        "header",
        tag("p", f"fedloom · {plural(count, 'run')} · {tasks}", class_="eyebrow"),
        tag("h1", title),
        *(tag("p", said, class_="lead") for said in comparison.headlines),
        tag("ul", *notes, class_="notes") if notes else "",
    )
    body = [
        header,
        parts(effects) if effects else "",
        results(comparison),
        _curves(data),
        costs(comparison),
        durations(groups),
        who_holds_what(data),
        _diagnostics(data),
        pictures(groups),
        losses(groups),
        setup(groups),
        starts(groups),
        runs(groups),
    ]
    return whole_page(title, body, data)


def whole_page(title: str, body: Sequence[str], data: Data) -> Safe:
    """A page with this body, and the figures that the script draws from the data."""
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), _asset("report.js")]
    body = [
        *body,
        tag("script", Safe(_inert(data)), type="application/json", id="data"),
        *(tag("script", Safe(script)) for script in scripts),
    ]
    head = [
        Safe('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Safe(f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">'),
        tag("title", title),
        tag("style", Safe(_asset("style.css"))),
    ]
    return join(Safe(f"{DOCTYPE}\n"), tag("html", tag("head", *head), tag("body", *body), lang="en"))


def _title(comparison: Comparison, grid: Grid | None) -> str:
    methods = list(dict.fromkeys(group.runs[0].method for group in comparison.groups))
    data = {str(group.runs[0].config.get("data", "")) for group in comparison.groups} - {""}
    what = " × ".join(plural(len(one.levels), one.name) for one in grid.factors) if grid else listed(methods)
    return what + (f" on {listed(sorted(data))}" if data else "")


def _curves(data: Data) -> Safe:
    if not data["curves"]:
        return Safe("")
    several = any(seeds > 1 for curve in data["curves"] for line in curve["lines"] for seeds in line["seeds"])
    hint = "Line: mean over seeds. Band: lowest to highest seed." if several else "A single seed, so no band."
    return section(
        "Learning curves",
        hint,
        tag("div", *(_choice(f"choose-{what}") for what in ("y", "x", "task")), class_="choices"),
        tag("div", id="legend", class_="legend"),
        tag("div", id="curves", role="img", aria_label="Learning curves; the table above has the numbers."),
    )


def who_holds_what(data: Data) -> Safe:
    """The section with the circles; nothing if no partition is known."""
    if not data["partitions"]:
        return Safe("")
    hint = "The area of a circle is the number of examples of a class that a client holds."
    cut = len(data["partitions"]) == MOST_PARTITIONS
    return section(
        "Who holds what",
        hint + (f" The first {MOST_PARTITIONS} partitions." if cut else ""),
        tag("div", _choice("choose-partition"), class_="choices"),
        tag("div", tag("div", id="partition"), class_="scroll", tabindex="0"),
        tag("p", id="partition-note", class_="hint"),
    )


def _diagnostics(data: Data) -> Safe:
    if not data["diagnostics"]:
        return Safe("")
    cut = len(data["diagnostics"]) == MOST_DIAGNOSTICS
    hint = "By round, mean over seeds." + (f" The first {MOST_DIAGNOSTICS}." if cut else "")
    return section("Diagnostics", hint, tag("div", id="diagnostics", class_="smalls"))


def _choice(name: str) -> Safe:
    return tag("div", id=name, class_="choice", role="group")


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
