"""A partition as an HTML page with statistics, or as an SVG image.

Both have the same circles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

from fedloom.errors import InputError
from fedloom.report.figures import Data, partition_figures
from fedloom.report.file_names import hide_setting_folders
from fedloom.report.markup import render_section, render_section_table, render_section_tag
from fedloom.report.page import build_html_page, write_html_page
from fedloom.report.records import Counts
from fedloom.report.sections import render_partition_section
from fedloom.utils.storage import write_atomically

PAPER, INK, SOFT, LINE, ACCENT = "#fdfdfb", "#1d2129", "#626975", "#e4e4df", "#33638d"
FONTS = "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
LONGEST = 18
"""Longest class name to show, in characters."""
SMALLEST = 0.5
"""Radius of the smallest visible circle."""

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class _PlotText:
    """A line of text; `x` is the position of its `anchor`, `y` its vertical middle."""

    x: float
    y: float
    text: str
    size: float = 13
    anchor: Anchor = "start"
    color: str = SOFT


@dataclass
class _PlotDrawing:
    """Lines, circles and texts, in units of about one pixel."""

    width: float
    height: float
    lines: list[tuple[float, float, float, float]] = field(default_factory=list)
    circles: list[tuple[float, float, float]] = field(default_factory=list)
    """Center and radius."""
    texts: list[_PlotText] = field(default_factory=list)


def _draw_plot(figure: Data) -> _PlotDrawing:
    """Lay out the counts of `partition_figures`: clients to the right, classes down."""
    clients, classes, names = figure["clients"], len(figure["classes"]), [_short(one) for one in figure["classes"]]
    wide = min(max(880 / clients, 11.0), 44.0)
    high = 26.0 if classes <= 30 else 13.0
    left, top = 34 + 7 * max(map(len, names), default=1), 84.0
    right, bottom = left + clients * wide, top + classes * high
    most = max(figure["count"], default=1)
    title = figure["title"]
    note = f"Rows: classes. Area of a circle: number of samples of a client, at most {most:,}."
    if figure["of"] > clients:
        note += f" The first {clients} of {figure['of']:,} clients."
    drawing = _PlotDrawing(max(right + 24, 24 + 8.6 * len(title), 24 + 6.6 * len(note)), bottom + 62)
    drawing.texts += [_PlotText(20, 28, title, 17, color=INK), _PlotText(20, 52, note)]
    for at in range(0, classes, 1 if classes <= 200 else 10):
        y = top + (at + 0.5) * high
        drawing.lines.append((left, y, right, y))
        drawing.texts.append(_PlotText(left - 8, y, names[at], 12 if classes <= 30 else 10, "end"))
    for at in range(0, clients, _step(26 / wide)):
        drawing.texts.append(_PlotText(left + (at + 0.5) * wide, bottom + 14, str(at), 12, "middle"))
    drawing.texts.append(_PlotText((left + right) / 2, bottom + 38, "client", anchor="middle"))
    # Many clients make narrow columns. If large circles are rare, they may reach into the next column.
    sparse = sum(figure["count"]) < 0.2 * most * clients * classes
    largest = min(2 * wide if sparse else wide, high) / 2
    for client, label, count in zip(figure["client"], figure["label"], figure["count"], strict=True):
        radius = max(largest * (count / most) ** 0.5, SMALLEST)
        drawing.circles.append((left + (client + 0.5) * wide, top + (label + 0.5) * high, radius))
    return drawing


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _step(least: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, ... that is not below `least`."""
    step = 1
    while step < least:
        step = {1: 2, 2: 5, 5: 10}[int(str(step)[0])] * 10 ** (len(str(step)) - 1)
    return step


def _drawing_to_svg(drawing: _PlotDrawing) -> str:
    """Return the drawing as SVG."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    lines = [f'<path d="M{x0:.1f} {y0:.1f}H{x1:.1f}"/>' for x0, y0, x1, _ in drawing.lines]
    circles = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.2f}"/>' for x, y, radius in drawing.circles]
    texts = [
        f'<text x="{one.x:.1f}" y="{one.y:.1f}" font-size="{one.size:g}" text-anchor="{one.anchor}" '
        f'fill="{one.color}" dominant-baseline="central">{escape(one.text)}</text>'
        for one in drawing.texts
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONTS}">',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            f'<g stroke="{LINE}">',
            *lines,
            "</g>",
            f'<g fill="{ACCENT}" fill-opacity=".8">',
            *circles,
            "</g>",
            *texts,
            "</svg>\n",
        ]
    )


ENDINGS = (".html", ".svg")


def check_partition_plot_path(path: Path) -> None:
    """Raise `InputError` for an unknown file ending, before the data are read."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"a partition is drawn as {' or '.join(ENDINGS)}, not as {path.name!r}.")


def write_partition_plot(
    path: Path, title: str, statistics_rows: Sequence[tuple[str, str]], counts: Counts, class_names: Sequence[str]
) -> None:
    """Plot a partition: one circle for each client and class, whose area is the count.

    `statistics_rows` appear on a page (.html) only; an image (.svg) has just the title.
    """
    check_partition_plot_path(path)
    names = [*class_names, *map(str, range(len(class_names), counts.shape[1]))]
    figure = partition_figures(hide_setting_folders(title), counts, names)
    if path.suffix.lower() == ".html":
        write_html_page(path, _page(figure, statistics_rows))
    else:
        write_atomically(path, _drawing_to_svg(_draw_plot(figure)).encode())


def _page(figure: Data, statistics_rows: Sequence[tuple[str, str]]) -> str:
    data: Data = {"groups": [], "tasks": [], "curves": [], "diagnostics": [], "partitions": [figure]}
    header = render_section_tag(
        "header",
        render_section_tag("p", "fedloom · partition", class_="eyebrow"),
        render_section_tag("h1", figure["title"]),
    )
    table = render_section(
        "Statistics", "", render_section_table(["", ""], [list(fact) for fact in statistics_rows], "text")
    )
    return build_html_page(figure["title"], [header, render_partition_section(data), table], data)
