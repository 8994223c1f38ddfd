"""A partition by itself: as a page with its statistics, or as a picture (SVG)."""

from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import InputError
from fedloom.report.bubbles import draw, to_svg
from fedloom.report.figures import Data, bubbles
from fedloom.report.html import who_holds_what, whole_page, write_page
from fedloom.report.markup import grid, tag
from fedloom.report.records import Counts
from fedloom.report.sections import section
from fedloom.storage import write_atomically

ENDINGS = (".html", ".svg")


def check_plot(path: Path) -> None:
    """Find out whether a plot can be written under this name, before the data are read."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"a partition is drawn as {' or '.join(ENDINGS)}, not as {path.name!r}.")


def write_plot(
    path: Path, title: str, facts: Sequence[tuple[str, str]], counts: Counts, class_names: Sequence[str]
) -> None:
    """Draw who holds which classes: a circle for each client and class, as large in area as the count.

    `facts` are said beside it on a page (.html); a picture (.svg) has the title alone.
    """
    check_plot(path)
    names = [*class_names, *map(str, range(len(class_names), counts.shape[1]))]
    figure = bubbles(title, counts, names)
    if path.suffix.lower() == ".html":
        write_page(path, _page(figure, facts))
    else:
        write_atomically(path, to_svg(draw(figure)).encode())


def _page(figure: Data, facts: Sequence[tuple[str, str]]) -> str:
    data: Data = {"groups": [], "tasks": [], "curves": [], "diagnostics": [], "partitions": [figure]}
    header = tag("header", tag("p", "fedloom · a partition", class_="eyebrow"), tag("h1", figure["title"]))
    table = section("In numbers", "", grid(["", ""], [list(fact) for fact in facts], "text"))
    return whole_page(figure["title"], [header, who_holds_what(data), table], data)
