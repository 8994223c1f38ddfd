"""HTML that is escaped unless it was made here."""

from html import escape


class Safe(str):
    """Text that is already HTML."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str | bool | None) -> Safe:
    """An element. Plain text inside it is escaped; `class_` is written `class`, `data_x` is `data-x`."""
    given = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            given += f" {key}" if value is True else f' {key}="{escape(value)}"'
    return Safe(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: str) -> Safe:
    """Pieces of HTML one after the other."""
    return Safe("".join(one if isinstance(one, Safe) else escape(one) for one in content))


def grid(titles: list[str], rows: list[list[str]], class_: str | None = None) -> Safe:
    """A table whose first column names its rows, in a box that scrolls by itself on a narrow screen."""
    head = tag("tr", *[tag("th", title, scope="col") for title in titles])
    body = [tag("tr", tag("th", row[0], scope="row"), *[tag("td", cell) for cell in row[1:]]) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body), class_=class_)
    return tag("div", table, class_="scroll", tabindex="0")
