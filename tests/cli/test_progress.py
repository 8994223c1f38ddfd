"""Tests of the progress display during long server work."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedloom.cli.progress import ProgressDisplay
from fedloom.config import make_config


def shown(capfd: pytest.CaptureFixture[str], quiet: bool = False) -> str:
    display = ProgressDisplay(quiet)
    display.on_run_start(Path("run"), make_config({"method": "dynafed", "rounds": 3}), [])
    try:
        for done in range(101):
            display.on_server_progress("synthesis", done, 100)
    finally:
        display.on_run_end()
    return capfd.readouterr().err


def test_work_is_told_now_and_then_and_at_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in shown(capfd).splitlines() if "synthesis" in line]
    assert lines[0].endswith("synthesis 0/100")
    assert lines[-1].endswith("synthesis 100/100")
    assert len(lines) == 2, "and not a hundred times in a moment"


def test_nobody_is_told_who_wants_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    assert shown(capfd, quiet=True) == ""


def test_the_time_left_is_from_the_pace_so_far(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    display = ProgressDisplay()
    display.on_run_start(Path("run"), make_config({"method": "dynafed", "rounds": 3}), [])
    display.on_server_progress("synthesis", 0, 100)
    clock += 20
    display.on_server_progress("synthesis", 25, 100)
    display.on_run_end()
    assert "synthesis 25/100, 1 min 00 s left" in capfd.readouterr().err


def test_work_that_goes_on_from_where_it_was_is_judged_by_what_is_new(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    display = ProgressDisplay()
    for start in (50, 0, 75):  # runs of one comparison, two of which were cut off
        display.on_run_start(Path("run"), make_config({"method": "dynafed", "rounds": 3}), [])
        clock += 100
        display.on_server_progress("synthesis", start, 100)
        clock += 20
        display.on_server_progress("synthesis", start + 10, 100)
        display.on_run_end()
    said = [line.partition("synthesis ")[2] for line in capfd.readouterr().err.splitlines() if "synthesis" in line]
    assert said == [
        "50/100",
        "60/100, 1 min 20 s left",
        "0/100",
        "10/100, 3 min 00 s left",
        "75/100",
        "85/100, 30.0 s left",
    ]


def test_runs_at_once_have_a_pace_each(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    display = ProgressDisplay()
    display.on_run_start(Path("runs"), make_config({"method": "dynafed", "rounds": 3}), [])
    for done in (0, 10, 20):
        display.on_server_progress("one: synthesis", done, 100)
        clock += 10
        display.on_server_progress("two: synthesis", 40 + done // 2, 100)
        clock += 10
    display.on_run_end()
    said = capfd.readouterr().err
    assert "one: synthesis 20/100, 2 min 40 s left" in said
    assert "two: synthesis 50/100, 3 min 20 s left" in said


def test_work_that_begins_anew_under_the_same_name_has_a_pace_of_its_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    display = ProgressDisplay()
    display.on_run_start(Path("run"), make_config({"method": "dynafed", "rounds": 3}), [])
    for done in (0, 100, 0, 10):
        display.on_server_progress("synthesis", done, 100)
        clock += 20
    display.on_run_end()
    assert "synthesis 10/100, 3 min 00 s left" in capfd.readouterr().err


def test_one_round_is_no_rounds(capfd: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay()
    display.on_run_start(Path("run"), make_config({"rounds": 1}), [])
    display.on_run_end()
    assert capfd.readouterr().err.endswith(": 1 round\n")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name", ["people[old].csv", "[/x]/p.csv", "a:cat:b.csv"])
def test_names_are_shown_as_they_are(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, name: str
) -> None:
    """Rich takes [old] for markup, [/x] for its end, and :cat: for a picture."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    display = ProgressDisplay()
    display.on_download(name, 0, 10)
    display.on_run_start(Path("run"), make_config({"data": f"table:/{name},label=y", "rounds": 2}), [])
    display.on_message(f"about {name}")
    display.on_server_progress(f"work on {name}", 0, 1)
    display.on_round_end({"round": 1, "note": name})
    display.on_run_end()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    title = f"fedavg on table:{Path(name).name}, seed 0" if terminal else f"fedavg on table:/{name},label=y, seed 0"
    for said in (f"downloading {name}", title, f"note: about {name}", f"work on {name}"):
        assert said in text


def test_a_long_path_leaves_room_for_the_rounds(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    display = ProgressDisplay()
    data = f"table:/{'a/long/way/' * 9}people.csv,label=income,owner=site"
    display.on_run_start(Path("run"), make_config({"data": data, "rounds": 200}), [])
    display.on_round_end({"round": 17, "accuracy": 0.5, "loss": 1.0})
    display.on_run_end()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    assert "fedavg on table:people.csv, seed 0" in text
    assert "round  17/200" in text


def test_a_run_that_begins_again_is_counted_once(capfd: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(methods=["fedavg"], seeds=2)
    for folder in ("a", "a", "b"):  # the first has found no memory, and goes on with fewer clients at once
        display.on_run_start(Path(folder), make_config({"rounds": 3}), [])
        display.on_run_end()
    assert re.findall(r"^(./2)  ", capfd.readouterr().err, re.MULTILINE) == ["1/2", "1/2", "2/2"]


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))


def bar_line(display: ProgressDisplay) -> str:
    """What the bar shows now."""
    assert display._bars is not None
    page = io.StringIO()
    Console(file=page, width=display.console.width).print(display._bars.get_renderable())
    (line,) = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", page.getvalue()).splitlines()
    return line.rstrip()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("methods", [(), ("fedavg", "fedcross", "lss")])
def test_nothing_moves_when_numbers_grow(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, methods: tuple[str, ...]
) -> None:
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    on_terminal(monkeypatch, width)
    display = ProgressDisplay(methods=methods, seeds=4)
    places = set()
    for run in range(4 * len(methods) or 1):
        display.on_run_start(Path(f"{run}"), make_config({"rounds": 1000}), [])
        for round, accuracy, loss in ((0, 0.0, 0.0), (1, 0.05, 9.9), (9, 0.5, 10.1), (10, 0.1, 123.4), (999, 1.0, 0.1)):
            display.on_round_end({"round": round, "accuracy": accuracy, "loss": loss})
            clock += 10 * round + 0.3
            line = bar_line(display)
            assert len(line) <= width
            assert width < 80 or f"accuracy {100 * accuracy:6.2f} %" in line
            assert f"round {round:4}/1000" in line
            bar = re.search("[━╸╺]+", line)
            assert bar
            places.add((*bar.span(), line.index("round")))
        display.on_run_end()
    assert len(places) == 1
    capfd.readouterr()


def test_a_comparison_tells_the_time_left_of_all_its_runs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three methods with two seeds: rounds of the first take 1 s, of the second 4 s; the third is unknown."""
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    on_terminal(monkeypatch, 120)
    display = ProgressDisplay(methods=["fedavg", "fedcross", "lss"], seeds=2)
    said = []
    for run, seconds in enumerate((1, 1, 4, 4)):
        display.on_run_start(Path(f"{run}"), make_config({"rounds": 10}), [])
        said.append(bar_line(display))
        for round in range(1, 11):
            clock += seconds
            display.on_round_end({"round": round, "accuracy": 0.5})
            if round == 5:
                said.append(bar_line(display))
        display.on_run_end()
    left = [line.partition(" 0:00:00")[2].strip() for line in said]
    assert left == [
        "",  # nothing is known
        "55 s left in all",  # 5 rounds, and five runs like this one
        "50 s left in all",
        "45 s left in all",
        "40 s left in all",  # the second method is taken for the first
        "1 min 50 s left in all",  # 5 rounds of 4 s, a run of 40 s, two of 25 s, the mean of both methods
        "1 min 30 s left in all",
        "1 min 10 s left in all",
    ]
    capfd.readouterr()


def test_runs_that_were_finished_before_are_counted_and_take_no_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = 1000.0
    monkeypatch.setattr("fedloom.cli.progress.time.monotonic", lambda: clock)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").touch()
    display = ProgressDisplay(methods=["fedavg", "fedcross"], seeds=2)
    history = [{"round": round} for round in range(6)]
    display.on_run_start(tmp_path / "fedcross-seed0", make_config({"method": "fedcross", "rounds": 10}), history)
    for round in range(6, 9):
        clock += 10
        display.on_round_end({"round": round})
    display.on_run_end()
    display.on_run_start(tmp_path / "fedcross-seed1", make_config({"method": "fedcross", "rounds": 10}), [])
    for round in range(3):
        clock += 10
        display.on_round_end({"round": round})
    display.on_run_end()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("3/4  fedcross on digits, seed 0: ")
    assert lines[0].endswith("resumes after round 5 of 10")
    assert any(line.endswith("round 8/10    2 min 00 s left in all") for line in lines), lines  # 2 rounds and a run
    assert any(line.endswith("round 2/10    1 min 20 s left in all") for line in lines), lines
