"""Tests that docs/papers.md is complete and its braces expand as it says."""

import re

from tests.support.papers_page import expand, read_rows

PAPERS = {
    "FedCDA": (range(1, 3), range(1, 5)),
    "FedCross": (("I", "II", "III"), range(1, 10)),
    "Local Superior Soups": (range(1, 11), range(1, 8)),
    "FedMR": (range(1, 2), range(1, 14)),
    "DynaFed": (range(1, 6), range(1, 7)),
}
"""The numbers of the tables and of the figures in each paper."""


def numbers(kind: str, where: str) -> set[str]:
    """Of `Table 1, Figures 2, 3` the tables (1), or the figures (2, 3)."""
    listed = re.findall(rf"{kind}s? ((?:[\dIV]+[a-d]?(?:, (?=[\da-d]))?)+)", where)
    return {number for each in listed for number in re.findall(r"[\dIV]+", each)}


def test_every_table_and_figure_of_the_papers_is_there() -> None:
    rows = read_rows()
    assert {row.paper for row in rows} == set(PAPERS)
    for paper, (tables, figures) in PAPERS.items():
        for kind, wanted in (("Table", tables), ("Figure", figures)):
            found = set().union(*(numbers(kind, row.where) for row in rows if row.paper == paper))
            assert found == {str(number) for number in wanted}, (paper, kind)


def test_what_cannot_be_run_says_why() -> None:
    silent = [row for row in read_rows() if not row.command]
    assert silent
    assert all(re.search("illustration|framework|notation|runs of Figure", row.what) for row in silent)


def test_lists_in_braces() -> None:
    assert expand("a") == ["a"]
    assert expand("a {b,c}") == ["a b", "a c"]
    assert expand("{1,2} {x,y}") == ["1 x", "1 y", "2 x", "2 y"]
    assert expand("{1,2} {x} {1,2}") == ["1 x 1", "2 x 2"], "the same list is the same choice"
