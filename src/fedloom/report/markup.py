"""HTML markup: escaped elements, folding tables, and samples of lines."""

from html import escape

from fedloom.report.file_names import hide_folders
from fedloom.report.statistics import GroupStatistics

HUES = 8
DASHES = ("", "10 4", "3 3", "10 4 3 4", "16 5", "16 4 3 4 3 4")
"""Dash patterns in pixels. A method has a hue and a dash, so that lines differ without colors too."""


class SectionHtml(str):
    """A string that is already HTML."""

    __slots__ = ()


def render_section_tag(name: str, *content: str, **attributes: str | bool | None) -> SectionHtml:
    """Return an element with escaped text. `class_` becomes `class`, `data_x` becomes `data-x`."""
    given = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            given += f" {key}" if value is True else f' {key}="{escape(hide_folders(value))}"'
    return SectionHtml(f"<{name}{given}>{join_section_html(*content)}</{name}>")


def join_section_html(*content: str) -> SectionHtml:
    """Join pieces of HTML. Plain text is escaped, and absolute paths in it become file names."""
    return SectionHtml("".join(one if isinstance(one, SectionHtml) else escape(hide_folders(one)) for one in content))


def render_section(title: str, hint: str, *content: str) -> SectionHtml:
    return render_section_tag(
        "section",
        render_section_tag("h2", title),
        render_section_tag("p", hint, class_="hint") if hint else "",
        *content,
    )


def render_section_table(titles: list[str], rows: list[list[str]], css_class: str | None = None) -> SectionHtml:
    """Return a table whose first column names the rows. On narrow screens each row becomes a list of its cells."""
    head = render_section_tag("tr", *[render_section_tag("th", title, scope="col") for title in titles])
    body = [
        render_section_tag(
            "tr",
            render_section_tag("th", row[0], scope="row"),
            *[
                render_section_tag("td", cell, data_title=title or None, class_="none" if cell == "–" else None)
                for title, cell in zip(titles[1:], row[1:], strict=True)
            ],
        )
        for row in rows
    ]
    table = render_section_tag(
        "table", render_section_tag("thead", head), render_section_tag("tbody", *body), class_=css_class
    )
    return render_section_tag("div", table, class_="scroll", tabindex="0")


def render_colored_label(group: GroupStatistics) -> SectionHtml:
    """Return the label of a group with a sample of its line."""
    line = SectionHtml('<line x1="1" x2="27" y1="4" y2="4"/>')
    sample = render_section_tag(
        "svg", line, class_="sample", width="28", height="8", aria_hidden="true", stroke=group_hue(group),
        stroke_dasharray=group_dash(group) or None,
    )  # fmt: skip
    return join_section_html(sample, group.label)


def group_hue(group: GroupStatistics) -> str:
    """Return the color of a group, a variable of the style sheet."""
    return f"var(--c{group.kind % HUES})"


def group_dash(group: GroupStatistics) -> str:
    """Return the dash pattern of the lines of a group; empty for a solid line."""
    return DASHES[group.kind % len(DASHES)]
