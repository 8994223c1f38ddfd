"""docs/papers.md as data: tables, figures and their commands."""

import re
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"


@dataclass(frozen=True)
class Row:
    """A line of one of the page's tables."""

    paper: str
    where: str
    """The tables and figures it is about, such as `Table 1, Figure 2`."""
    what: str
    command: str
    """With its variables put in, and its braces as they are; empty where nothing can be run."""

    def __str__(self) -> str:
        return f"{self.paper}-{self.where}-{self.what[:30]}".replace(" ", "_")

    def commands(self) -> list[list[str]]:
        """The words of each command that the row stands for, without `fedloom`."""
        return [shlex.split(text)[1:] for text in expand(self.command)] if self.command else []


def expand(text: str) -> list[str]:
    """One text for each choice of values from the lists in braces; equal lists choose alike."""
    lists = list(dict.fromkeys(re.findall(r"\{([^{}]*)\}", text)))
    found = []
    for values in product(*(each.split(",") for each in lists)):
        made = text
        for each, value in zip(lists, values, strict=True):
            made = made.replace(f"{{{each}}}", value)
        found.append(made)
    return found


def read_rows(page: Path = PAGE) -> list[Row]:
    """All lines of all tables."""
    rows, variables, paper = [], dict[str, str](), ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        elif given := re.fullmatch(r'([A-Z0-9_]+)="(.*)"', line):
            variables[given[1]] = given[2]
        elif line.startswith("| ") and not line.startswith("| where"):
            where, what, cell = (part.strip() for part in line.strip("|").split("|"))
            command = "" if cell == "–" else cell.strip("`")
            rows.append(Row(paper, where, what, re.sub(r"\$(\w+)", lambda name: variables[name[1]], command)))
    return rows
