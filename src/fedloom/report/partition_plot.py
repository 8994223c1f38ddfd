"""A partition as an HTML page with statistics, or as an SVG image.

Both have the same circles.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

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


def _draw_svg(figure: Data) -> str:
    """Draw the counts of `partition_figures` as SVG: clients to the right, classes down."""
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
    width, height = f"{max(right + 24, 24 + 8.6 * len(title), 24 + 6.6 * len(note)):.0f}", f"{bottom + 62:.0f}"
    lines, circles, texts = [], [], [_svg_text(20, 28, title, 17, color=INK), _svg_text(20, 52, note)]
    for at in range(0, classes, 1 if classes <= 200 else 10):
        y = top + (at + 0.5) * high
        lines.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        texts.append(_svg_text(left - 8, y, names[at], 12 if classes <= 30 else 10, "end"))
    for at in range(0, clients, _step(26 / wide)):
        texts.append(_svg_text(left + (at + 0.5) * wide, bottom + 14, str(at), 12, "middle"))
    texts.append(_svg_text((left + right) / 2, bottom + 38, "client", anchor="middle"))
    # Many clients make narrow columns. If large circles are rare, they may reach into the next column.
    sparse = sum(figure["count"]) < 0.2 * most * clients * classes
    largest = min(2 * wide if sparse else wide, high) / 2
    for client, label, count in zip(figure["client"], figure["label"], figure["count"], strict=True):
        x, y, radius = left + (client + 0.5) * wide, top + (label + 0.5) * high, largest * (count / most) ** 0.5
        circles.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{max(radius, SMALLEST):.2f}"/>')
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


def _svg_text(x: float, y: float, text: str, size: float = 13, anchor: str = "start", color: str = SOFT) -> str:
    """Return a line of text; `x` is the position of its `anchor`, `y` its vertical middle."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'fill="{color}" dominant-baseline="central">{escape(text)}</text>'
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _step(least: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, ... that is not below `least`."""
    step = 1
    while step < least:
        step = {1: 2, 2: 5, 5: 10}[int(str(step)[0])] * 10 ** (len(str(step)) - 1)
    return step


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
        write_atomically(path, _draw_svg(figure).encode())


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
