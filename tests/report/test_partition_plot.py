"""Tests of a partition as page and SVG: a circle of the right area per count."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import FedloomError, InputError
from fedloom.report.figures import MOST_CLIENTS, partition_figures
from fedloom.report.partition_plot import LONGEST, SMALLEST, _draw_svg, _step, write_partition_plot

COUNTS = np.array([[40, 0, 10], [0, 2000, 0], [500, 1, 0]])
NAMES = ("cat", "dog & <b>", "a name that is far too long to be shown")
SVG = "{http://www.w3.org/2000/svg}"


def parse_circles(root: ET.Element) -> list[tuple[float, float, float]]:
    """Return center and radius of the circles, which the file has with one and two decimals."""
    circles = [[float(node.attrib[name]) for name in ("cx", "cy", "r")] for node in root.iter(f"{SVG}circle")]
    return [(x, y, radius) for x, y, radius in circles]


def test_circles_lie_in_their_cells_and_have_their_areas() -> None:
    root = ET.fromstring(_draw_svg(partition_figures("three", COUNTS, NAMES)))
    circles = {(x, y): radius for x, y, radius in parse_circles(root)}
    assert len(circles) == np.count_nonzero(COUNTS)
    columns, rows = (sorted({place[axis] for place in circles}) for axis in (0, 1))
    assert (len(columns), len(rows)) == (3, 3)
    assert np.allclose(np.diff(columns), columns[1] - columns[0])
    largest = circles[columns[1], rows[1]]
    for (client, label), count in np.ndenumerate(COUNTS):
        radius = circles.get((columns[client], rows[label]))
        if count == 0:
            assert radius is None
        else:
            assert radius == pytest.approx(max(largest * (count / 2000) ** 0.5, SMALLEST), abs=0.01)
    assert 2 * largest <= min(columns[1] - columns[0], rows[1] - rows[0])


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (3, 10), (30, 62), (200, 100), (1000, 10)])
def test_everything_is_on_the_paper(clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    root = ET.fromstring(_draw_svg(partition_figures("a title", counts, [f"class {at}" for at in range(classes)])))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for x, y, radius in parse_circles(root):
        assert radius < x < width - radius
        assert radius < y < height - radius
    texts = list(root.iter(f"{SVG}text"))
    for text in texts:
        assert 0 < float(text.attrib["x"]) < width
        assert 0 < float(text.attrib["y"]) < height
    said = [text.text or "" for text in texts]
    assert any(f"The first {MOST_CLIENTS} of 1,000 clients" in text for text in said) == (clients > MOST_CLIENTS)
    ticks = [int(text) for text in said if text.isdigit()]
    assert len(ticks) <= 40 or clients == MOST_CLIENTS


def test_ticks_are_round_numbers() -> None:
    assert [_step(least) for least in (0.1, 1, 1.5, 3, 6, 11, 21, 51)] == [1, 1, 2, 5, 10, 20, 50, 100]


def test_the_svg_is_well_formed_whatever_names_hold() -> None:
    root = ET.fromstring(_draw_svg(partition_figures("<three>", COUNTS, NAMES)))
    assert len(root.findall(f".//{SVG}circle")) == np.count_nonzero(COUNTS)
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert "<three>" in texts
    assert "dog & <b>" in texts
    assert f"{NAMES[2][: LONGEST - 1]}…" in texts


def test_the_page_holds_the_numbers_and_the_circles(tmp_path: Path) -> None:
    write_partition_plot(
        tmp_path / "p.html", "three <clients>", [("samples", "2,551"), ("a & b", "<x>")], COUNTS, NAMES
    )
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<title>three &lt;clients&gt;</title>" in page
    assert "2,551" in page
    assert "a &amp; b" in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    (drawn,) = json.loads(found[1])["partitions"]
    assert drawn["count"] == [40, 10, 2000, 500, 1]
    assert drawn["classes"] == list(NAMES)


@pytest.mark.parametrize("name", ["p.pdf", "p", "p.png"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"drawn as \.html or \.svg, not as"):
        write_partition_plot(tmp_path / name, "three", [], COUNTS, NAMES)


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, ending: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FedloomError, match="cannot"):
        write_partition_plot(tmp_path / "file" / f"p.{ending}", "three", [], COUNTS, NAMES)
