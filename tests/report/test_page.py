"""Tests of the HTML report: sections, escaping, figures."""

import base64
import hashlib
import json
import re
import shlex
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import InputError
from fedloom.report import RunRecord, make_comparison_table, read_run_record, write_report_page
from fedloom.report.figures import MOST_CLIENTS, _metric_curve, collect_figure_data
from fedloom.report.markup import SectionHtml, render_section_tag
from fedloom.utils.storage import read_json, write_json
from tests.support.fake_runs import add_metrics, write_metrics, write_run, write_runs
from tests.support.report_pages import EVIL, Page


def report(records, path: Path, **options) -> Page:
    write_report_page(records, path, **options)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return [read_run_record(folder) for folder in write_runs(tmp_path_factory.mktemp("runs"))]


@pytest.fixture
def evil(tmp_path):
    folder = write_run(tmp_path / "evil<b>", EVIL, data=EVIL, command=EVIL, options={EVIL: {EVIL: 1}}, rounds=3)
    names = [EVIL] * 10
    counts = read_json(folder / "partition.json")["counts"]
    write_json(folder / "partition.json", {"class_names": names, "counts": counts})
    row = {
        "round": 4,
        "failed": 1,
        "failed_clients": {EVIL: EVIL},
        "diagnostics": {EVIL: 1.0},
        "seconds": {EVIL: 2},
    }
    add_metrics(folder, row)
    write_json(folder / "summary.json", {**read_json(folder / "summary.json"), "digest": EVIL})
    return read_run_record(folder)


def test_the_page_shows_every_number_of_the_table(records, tmp_path):
    page = report(records, tmp_path / "report.html", title="Three methods")
    comparison = make_comparison_table(records)
    lines = set(page.text.split("\n"))
    titles, rows = comparison.table()
    assert lines.issuperset(titles)
    assert lines.issuperset(cell for row in rows for cell in row)
    assert lines.issuperset([*comparison.headlines, "Three methods", "dirichlet:0.3"])
    assert "fedcross.alpha 0.99, fedcross.strategy lowest_similarity" in lines
    assert "fedloom run fedmr --clients 20 --seed 0" in page.text  # one command for each row
    assert "fedloom run fedmr --clients 20 --seed 2" not in page.text
    assert "no answer within 30 s" in page.text
    assert "torch 2.13.0" in page.text


def test_a_page_is_written_over_and_nothing_else(records, tmp_path):
    path = tmp_path / "report.html"
    for _ in range(2):
        report(records, path)
    config = tmp_path / "config.toml"
    config.write_text("mine")
    with pytest.raises(
        InputError, match=r"config.toml' already exists and is not an HTML page; choose another file\.$"
    ):
        write_report_page(records, config)
    assert config.read_text() == "mine"


def test_the_page_fetches_nothing(records, tmp_path):
    page = report(records, tmp_path / "report.html")
    for _, given in page.elements:
        assert not {"src", "href", "srcset", "data", "action"} & given.keys()
    text = (tmp_path / "report.html").read_text(encoding="utf-8").replace(page.scripts[1], "")
    text = text.replace('"http://www.w3.org/2000/svg"', "")  # the name of SVG, not an address
    assert not re.search(r"https?://|@import|url\(", text)
    assert "plotly.js" in page.scripts[1][:200]


def test_a_page_is_at_most_one_and_a_half_megabytes(records, tmp_path):
    report(records, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 1_500_000


def test_the_vendored_library_is_the_one_that_its_readme_names():
    folder = resources.files("fedloom.report").joinpath("vendor")
    library = folder.joinpath("plotly-basic.min.js").read_bytes()
    readme = folder.joinpath("README.md").read_text()
    assert f"`{hashlib.sha256(library).hexdigest()}`" in readme
    version = re.search(r"version ([\d.]+)\.", readme)[1]
    assert f"plotly.js (basic - minified) v{version}".encode() in library[:100]
    assert b"MIT license" in library[:200]
    assert folder.joinpath("LICENSE-plotly.txt").read_text().startswith("MIT License")


def test_every_method_has_a_dash_of_its_own(records, tmp_path):
    page = report(records, tmp_path / "report.html")
    groups = json.loads(page.scripts[0])["groups"]
    assert len({group["dash"] for group in groups}) == len(groups) == 3
    samples = [given.get("stroke-dasharray", "") for name, given in page.elements if given.get("class") == "sample"]
    assert set(samples) == {group["dash"] for group in groups}


def test_only_settings_at_their_defaults_are_folded(tmp_path):
    command = "fedloom run fedavg --momentum 0.9 --no-tidy --set fedavg.server_lr=2"
    more = {"options": {"fedavg": {"server_lr": 2, "weighting": "uniform"}}, "tidy": False, "nesterov": False}
    record = read_run_record(write_run(tmp_path / "run", command=command, rounds=4, **more))
    write_report_page([record], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    settings, folded = text.partition("<h2>Settings")[2].partition("</section>")[0].split("<details>")
    assert re.findall("<dt>(.*?)</dt>", folded) == ["eval_every", "nesterov", "fedavg.weighting"]
    assert {"momentum", "tidy", "fedavg.server_lr", "partition", "lr"} <= set(re.findall("<dt>(.*?)</dt>", settings))
    assert "3 settings at default" in folded


def test_one_command_is_at_the_top(records, tmp_path):
    page = report(
        records, tmp_path / "report.html", command="fedloom compare fedavg --data table:/home/me/my\\ data.csv"
    )
    lines = [line for line in page.text.split("\n") if line.startswith("fedloom ")]
    assert lines[1] == "fedloom compare fedavg --data 'table:my data.csv'"
    assert "Files are named without their folders; add yours before you run it." in page.text
    alone = report(records[:1], tmp_path / "report.html")
    assert [line for line in alone.text.split("\n") if line.startswith("fedloom ")][1] == records[0].config["command"]
    assert "without their folders" not in alone.text


def test_no_absolute_path_is_in_a_page(tmp_path):
    """Data, partitions, initial weights and plugins may lie anywhere; a report names the files only."""
    secret = tmp_path / "home of me" / "secret"
    folders = [
        write_run(
            tmp_path / f"run{at}",
            data=f"table:{secret}/{at}/people.csv,label=income,test={secret}/test.csv",
            partition=f"file:{secret}/split.json",
            init=f"{secret}/start.safetensors",
            imports=[f"{secret}/mine.py"],
            command=shlex.join(["fedloom", "run", "fedavg", "--data", f"table:{secret}/{at}/people.csv"]),
            rounds=4,
        )
        for at in range(2)
    ]
    for folder in folders:
        write_json(folder / "initial.json", {"file": f"{secret}/start.safetensors"})
        row = {"round": 5, "failed": 1, "failed_clients": {"1": f"[Errno 2] no file: '{secret}/x.npz'"}}
        add_metrics(folder, row)
    command = shlex.join(["fedloom", "compare", "fedavg", "--cache-dir", f"{secret}/cache"])
    page = report([read_run_record(folder) for folder in folders], tmp_path / "report.html", command=command)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "secret" not in text
    assert str(tmp_path) not in text
    tasks = json.loads(page.scripts[0])["tasks"]
    assert ["0/people.csv" in tasks[0], "1/people.csv" in tasks[1]] == [True, True], "two files stay two tasks"
    assert "mine.py" in page.text
    assert "no file: 'x.npz'" in page.text


def test_the_policy_names_exactly_the_scripts_of_the_page(records, tmp_path):
    page = report(records, tmp_path / "report.html")
    policy = next(given["content"] for _, given in page.elements if given.get("http-equiv"))
    assert "default-src 'none'" in policy
    digests = [hashlib.sha256(script.encode()).digest() for script in page.scripts[1:]]
    assert re.findall(r"'sha256-(.*?)'", policy) == [base64.b64encode(one).decode() for one in digests]


def test_the_data_of_the_figures_survive_the_page(records, tmp_path):
    page = report(records, tmp_path / "report.html")
    assert json.loads(page.scripts[0]) == collect_figure_data(make_comparison_table(records).groups)


def test_nothing_from_a_file_becomes_markup(evil, tmp_path):
    page = report([evil], tmp_path / "report.html", title=EVIL)
    names = [name for name, _ in page.elements]
    assert names.count("script") == 3
    assert "img" not in names
    assert not any("onerror" in given for _, given in page.elements)
    assert page.text.count("window.evil = 1") >= 5
    assert json.loads(page.scripts[0])["groups"][0]["label"].startswith(EVIL)


def test_markup_escapes_text_and_attributes():
    made = render_section_tag(
        "p", "<&", render_section_tag("b", ">"), SectionHtml("<hr>"), title='"<', hidden=True, lang=None
    )
    assert made == '<p title="&quot;&lt;" hidden>&lt;&amp;<b>&gt;</b><hr></p>'


@pytest.mark.parametrize("history", [
    [],
    [{"round": 0}],
    [{"round": 0, "loss": 3.0}, {"round": 1, "loss": float("nan"), "seconds": None, "failed_clients": [1]}],
    [{"round": 0, "accuracy": None}, {"round": 1, "accuracy": 0.5, "diagnostics": {"": None}, "clients": []}],
    [{"round": 1, "accuracy": 0.0, "loss": float("inf"), "seconds": {"total": 0.0}, "failed": 3}],
])  # fmt: skip
def test_holes_are_tolerated(history, tmp_path):
    page = report([RunRecord(tmp_path, {}, history)], tmp_path / "report.html")
    assert "unfinished" in page.text
    assert "nan" not in page.text.lower().replace("unnamed", "")


def test_a_regression_has_no_accuracy_anywhere(tmp_path):
    history = [{"round": at, "loss": 1 / (at + 1)} for at in range(5)]
    page = report([RunRecord(tmp_path, {"method": "fedavg"}, history, {})], tmp_path / "report.html")
    assert [curve["key"] for curve in json.loads(page.scripts[0])["curves"]] == ["loss"]
    assert "accuracy" not in page.text


def test_a_line_is_the_mean_over_seeds_and_what_it_cost(records):
    runs = [record for record in records if record.method == "fedavg"]
    drawn = _metric_curve(runs, "accuracy")
    values = np.array([run.series("accuracy")[1] for run in runs])
    np.testing.assert_allclose(drawn["mean"], values.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(drawn["low"], values.min(axis=0), rtol=1e-5)
    np.testing.assert_allclose(drawn["high"], values.max(axis=0), rtol=1e-5)
    total = np.mean([run.total("bytes_up") + run.total("bytes_down") for run in runs])
    assert drawn["bytes"][-1] == pytest.approx(total, rel=1e-5)
    assert (drawn["round"][0], drawn["bytes"][0], drawn["seeds"][0]) == (0, 0.0, 3)


def test_one_partition_for_each_seed_and_not_for_each_method(records):
    drawn = collect_figure_data(make_comparison_table(records).groups)["partitions"]
    assert [one["title"] for one in drawn] == ["seed 0", "seed 1", "seed 2"]
    for one, run in zip(drawn, records, strict=False):
        assert sum(one["count"]) == run.counts.sum()
        assert run.counts[one["client"], one["label"]].tolist() == one["count"]


def test_of_very_many_clients_the_first_are_drawn(tmp_path):
    record = read_run_record(write_run(tmp_path / "run", clients=MOST_CLIENTS + 50))
    (one,) = collect_figure_data(make_comparison_table([record]).groups)["partitions"]
    assert (one["clients"], one["of"], max(one["client"]) < MOST_CLIENTS) == (200, 250, True)


def test_the_file_is_written_whole_or_not_at_all(records, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("<!doctype html> before")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(InputError, match="No space left"):
            write_report_page(records, path)
    assert path.read_text() == "<!doctype html> before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="cannot be written"):
        write_report_page(records, tmp_path / "nowhere" / "report.html")


def test_a_browser_draws_the_figures(records, tmp_path, browse):
    write_report_page(records, tmp_path / "report.html")
    page = browse(tmp_path / "report.html")
    curves, _, rest = page.partition('id="partition"')
    assert curves.count('class="trace scatter') == 2 * 3  # a line and a band for each method
    assert page.count('aria-pressed="true"') == 6  # y, x, three methods, one partition
    assert page.count(">Copy</button>") == 1  # the commands of single runs
    radii = [float(r) for r in re.findall(r'class="point"[^>]*? d="M([\d.]+),0A', rest)]
    counts = collect_figure_data(make_comparison_table(records).groups)["partitions"][0]["count"]
    assert len(radii) == len(counts)
    scale = max(radii) ** 2 / max(counts)
    np.testing.assert_allclose(radii, np.sqrt(scale * np.array(counts)), atol=0.02)  # area, not width


def test_no_two_marks_of_an_axis_say_the_same(tmp_path, browse):
    """Of a short run whose accuracy hardly moves."""
    folder = write_run(tmp_path / "run", rounds=3, finished=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for at, row in enumerate(rows):
        row["accuracy"] = 0.1 + 0.001 * at
        del row["sha256"]
    write_metrics(folder, rows)
    write_report_page([read_run_record(folder)], tmp_path / "report.html")
    curves = browse(tmp_path / "report.html").partition('id="curves"')[2].partition('id="partition"')[0]
    assert re.findall(r'class="xtick"><text[^>]*>([^<]*)<', curves) == ["0", "1", "2", "3"]
    marks = re.findall(r'class="ytick"><text[^>]*>([^<]*)<', curves)
    assert len(marks) > 2
    assert len(set(marks)) == len(marks)


def test_a_browser_runs_nothing_that_came_from_a_file(evil, tmp_path, browse):
    write_report_page([evil], tmp_path / "report.html")
    page = browse(tmp_path / "report.html")
    assert 'class="trace scatter' in page
    assert "<img src=" not in page
    assert re.search(r'class="ytick"><text[^>]*>&lt;b&gt;', page)  # a class's name, as it was given
