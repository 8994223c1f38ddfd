"""Tables in the pages of the documentation, made from results."""

import re
from collections.abc import Callable, Mapping


def markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    bars = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in bars)


def fill_blocks(page: str, mark: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with new text from each `<!-- MARK: NAME -->` to `<!-- end -->`."""

    def fill(found: re.Match[str]) -> str:
        text = blocks[found[1]]() if found[1] in blocks else "Not run yet.\n"
        return f"<!-- {mark}: {found[1]} -->\n\n{text}\n<!-- end -->"

    return re.sub(rf"<!-- {mark}: (.+?) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)
