"""A partition by itself: as a page with its statistics, or as a picture, SVG or PNG."""

from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import InputError
from fedloom.report.bubbles import draw, to_png, to_svg
from fedloom.report.figures import Data, bubbles
from fedloom.report.html import who_holds_what, whole_page, write_page
from fedloom.report.markup import grid, tag
from fedloom.report.records import Counts
from fedloom.report.sections import section
from fedloom.storage import write_atomically

ENDINGS = (".html", ".svg", ".png")


def check_plot(path: Path) -> None:
    """Find out whether a plot can be written under this name, before the data are read."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"a partition is drawn as {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, not as {path.name!r}.")
    if path.suffix.lower() == ".png":
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise InputError(
                "a PNG is drawn by Pillow, which is not installed; pip install 'fedloom[images]', or draw .svg or "
                ".html."
            ) from None


def write_plot(
    path: Path, title: str, facts: Sequence[tuple[str, str]], counts: Counts, class_names: Sequence[str]
) -> None:
    """Draw who holds which classes: a circle for each client and class, as large in area as the count.

    `facts` are said beside it on a page (.html); a picture (.svg, .png) has the title alone.
    """
    check_plot(path)
    names = [*class_names, *map(str, range(len(class_names), counts.shape[1]))]
    figure = bubbles(title, counts, names)
    kind = path.suffix.lower()
    if kind == ".html":
        write_page(path, _page(figure, facts))
    else:
        drawing = draw(figure)
        write_atomically(path, to_svg(drawing).encode() if kind == ".svg" else to_png(drawing))


def _page(figure: Data, facts: Sequence[tuple[str, str]]) -> str:
    data: Data = {"groups": [], "tasks": [], "curves": [], "diagnostics": [], "partitions": [figure]}
    header = tag("header", tag("p", "fedloom · a partition", class_="eyebrow"), tag("h1", figure["title"]))
    table = section("In numbers", "", grid(["", ""], [list(fact) for fact in facts], "text"))
    return whole_page(figure["title"], [header, who_holds_what(data), table], data)
