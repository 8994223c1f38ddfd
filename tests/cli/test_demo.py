"""Tests of the demo: its sentences, its commands, and how it continues."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.cli.demo.command import DEMO_SCENES
from fedloom.cli.demo.play import play_demo
from fedloom.cli.demo.progress import DemoProgress
from fedloom.cli.demo.scene import DemoClaim, DemoFinding, DemoScene, format_demo_command
from fedloom.cli.demo.verdicts import SeedResult, judge_demo_claim
from fedloom.cli.main import main
from fedloom.config import make_config, replace_config
from fedloom.errors import RunStopped
from fedloom.methods.variants import parse_method_variant

ROOT = Path(__file__).parents[2]
PAPERS = ["fedcross", "fedmr", "fedcda", "lss", "dynafed"]
CLAIMS = [(scene, claim) for scene in DEMO_SCENES for claim in scene.claims]
REDUCED: dict[str, Any] = {"model": "mlp", "epochs": 1, "rounds": 2, "eval_every": 1, "engine": "sequential"}
FEW = {"fedcda": {"warmup": 1}, "dynafed": {"L": 2, "s": 1, "iterations": 1, "inner_steps": 1}}


def reduce_scene(scene: DemoScene) -> DemoScene:
    """The same scene with one seed and two rounds, three if it has a jump."""
    options = {method: {**pairs, **FEW[method]} for method, pairs in scene.options.items()}
    rounds = 3 if scene.jump_round else 2
    start = (
        replace(scene.start, settings={**scene.start.settings, "model": "mlp", "rounds": 1}) if scene.start else None
    )
    return replace(
        scene,
        seeds=1,
        settings={**scene.settings, **REDUCED, "rounds": rounds},
        options=options,
        start=start,
        jump_round=2 if scene.jump_round else 0,
    )


def test_five_papers_have_a_claim() -> None:
    assert [name for scene in DEMO_SCENES for name in scene.names] == PAPERS


@pytest.mark.parametrize(("scene", "claim"), CLAIMS, ids=PAPERS)
def test_a_claim_is_about_rows_of_its_scene(scene: DemoScene, claim: DemoClaim) -> None:
    named = {claim.row, claim.baseline} | {row for finding in claim.findings for row in (finding.row, finding.baseline)}
    assert named <= scene.rows.keys()
    assert len(claim.findings) > 1, "a claim has a control"
    for row in scene.rows:
        assert parse_method_variant(row).label == row, "progress finds a run by its label"


# sentences


def make_results(values: dict[str, list[float]], measure: str) -> dict[str, dict[int, SeedResult]]:
    """Results whose only difference is in one measure."""

    def result(value: float) -> SeedResult:
        first, jump = (value if measure == name else 0.0 for name in ("first", "jump"))
        by_round = {0: 0.0, 1: first, 20: 0.0, 21: jump}
        spread = value if measure == "spread" else 0.0
        return SeedResult(value if measure == "accuracy" else 0.0, spread, by_round)

    return {row: {seed: result(value) for seed, value in enumerate(column)} for row, column in values.items()}


@given(
    st.integers(1, 5).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 300), min_size=n, max_size=n)] * 2)),
    st.sampled_from(["accuracy", "spread", "first", "jump"]),
)
def test_supported_means_that_the_interval_excludes_zero_on_the_side_of_the_claim(
    columns: tuple[list[int], list[int]], measure: Any
) -> None:
    ours, theirs = ([value / 10 for value in column] for column in columns)
    claim = DemoClaim("Paper", "", "a", "b", (measure,), (DemoFinding("b", "a", "; the other way {outcome}, {gain}"),))
    scene = DemoScene("", (claim,), {"a": 1.0, "b": 1.0}, {"lr": 0.01}, jump_round=20)
    said = judge_demo_claim(scene, claim, make_results({"a": ours, "b": theirs}, measure))
    gaps = np.subtract(ours, theirs) * (-1 if measure == "spread" else 1)
    below = above = False
    if len(gaps) > 2 and np.std(gaps) > 1e-6:
        low, high = stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), stats.sem(gaps))
        below, above = high < 0, low > 0
    outcome = {True: "supported", False: "not supported"}
    assert said.startswith(f"Paper: {outcome[bool(above)]} at lr=0.01, ")
    assert f"; the other way {outcome[bool(below)]}, " in said


def test_a_claim_about_two_measures_needs_both() -> None:
    claim = DemoClaim("Paper", "", "a", "b", ("spread", "accuracy"), ())
    scene = DemoScene("", (claim,), {"a": 1.0, "b": 1.0}, {"lr": 0.01})
    theirs = {seed: SeedResult(50.0, 5.0 + seed, {}) for seed in range(3)}

    def judge(level: float, spread: float) -> str:
        ours = {seed: SeedResult(level + seed, spread, {}) for seed in range(3)}
        return judge_demo_claim(scene, claim, {"a": ours, "b": theirs})

    assert judge(60.0, 0.0).startswith("Paper: supported at lr=0.01, spread −6.0 [−8.5, −3.5] and accuracy +11.0 [+8.5")
    assert judge(49.0, 0.0).startswith("Paper: partly supported")
    assert judge(40.0, 0.0).startswith("Paper: partly supported"), "and the accuracy is lower"
    assert judge(40.0, 20.0).startswith("Paper: not supported")
    assert judge(40.0, 0.0).endswith("accuracy −9.0 [−11.5, −6.5] against b.")


# commands


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `compare` and `run` are asked to do, in place of doing it."""
    calls: list[Any] = []

    def note(name: str) -> Any:
        def call(*arguments: Any, **settings: Any) -> None:
            calls.append((name, arguments, settings))
            if name == "compare":
                raise RunStopped("enough")

        return call

    for module in ("fedloom.runs.compare", "fedloom.cli.demo.play"):
        monkeypatch.setattr(f"{module}.compare", note("compare"))
    monkeypatch.setattr("fedloom.cli.demo.play.run", note("run"))
    monkeypatch.setattr("fedloom.runs.execute.execute_run", note("execute_run"))
    return calls


def normalize(call: Any) -> Any:
    """A comparison as its rows, seeds, options and settings, however they were given."""
    name, arguments, settings = call
    ignored = {"callbacks", "out", "report", "grid", "target", "concurrent_runs", "options"}
    plain = {key: value for key, value in settings.items() if key not in ignored}
    if name == "run":
        return "run", make_config({"method": arguments[0], **plain})
    if name == "execute_run":
        return "run", replace_config(arguments[0].config, options={})
    if "init" in plain:
        plain["init"] = Path(plain["init"]).name
    config = make_config(plain).model_dump(exclude={"init"}) | {"init": plain.get("init")}
    return name, list(arguments[0]), arguments[1], settings["options"], config


@pytest.mark.parametrize("scene", DEMO_SCENES, ids=lambda scene: scene.folder)
def test_the_printed_commands_are_what_is_run(
    scene: DemoScene, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunStopped):
        play_demo([scene], tmp_path / "out", quiet=True)
    played = [normalize(call) for call in asked]
    asked.clear()
    for words in scene.commands():
        typed = shlex.split(format_demo_command(words).replace("\\\n", " "))
        assert typed[0] == "fedloom"
        with pytest.raises((SystemExit, AttributeError)):  # nothing was made that could be printed
            main(typed[1:])
    assert [normalize(call) for call in asked] == played


def test_a_command_is_cut_between_options() -> None:
    words = ["fedloom", "compare", "fedavg", *(word for at in range(20) for word in ("--set", f"fedavg.option={at} %"))]
    text = format_demo_command(words)
    assert shlex.split(text.replace("\\\n", " ")) == words
    assert max(map(len, text.splitlines())) <= 100
    assert all(line.strip().startswith(("fedloom", "--set")) for line in text.splitlines())


# a whole demo


def test_a_demo_judges_five_papers_and_writes_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenes = [reduce_scene(scene) for scene in DEMO_SCENES]
    results = play_demo(scenes, tmp_path / "whole")
    whole = capsys.readouterr()
    assert results.keys() == {scene.folder for scene in scenes}
    assert all(results[scene.folder].keys() == scene.rows.keys() for scene in scenes)
    for paper in ("FedCross", "FedMR", "FedCDA", "LSS", "DynaFed"):
        assert f"\n{paper}: not supported at lr=" in whole.out, "one seed supports nothing"
    for scene in scenes:
        for words in scene.commands():
            assert f"\n{format_demo_command(words)}\n" in whole.out
    page = (tmp_path / "whole" / "report.html").read_text()
    assert all(f"{row} · " in page for scene in scenes for row in scene.rows)
    assert f"report: {tmp_path / 'whole' / 'report.html'}\n" in whole.out
    assert len(re.findall(r"^  fedloom ", whole.out, flags=re.MULTILINE)) == 3
    assert f"\nscene 4 of 4  {list(scenes[3].rows)[-1]}, seed 0, round 0/3: " in whole.err
    assert not list((tmp_path / "whole").glob("*/*/report.html"))


def test_a_stopped_demo_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = [reduce_scene(scene) for scene in DEMO_SCENES[2:]]
    rounds = iter(range(12))
    monkeypatch.setattr(DemoProgress, "should_stop", lambda progress: next(rounds, None) is None)
    with pytest.raises(RunStopped, match=r"continue with: fedloom demo lss dynafed --out .*again$"):
        play_demo(scenes, tmp_path / "again", quiet=True)
    monkeypatch.undo()
    stopped = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("*/*/summary.json")}
    assert 0 < len(stopped) < sum(len(scene.rows) for scene in scenes)
    capsys.readouterr()
    results = play_demo(scenes, tmp_path / "again", quiet=True)
    said = capsys.readouterr()
    assert said.err == ""
    assert play_demo(scenes, tmp_path / "again", quiet=True) == results
    assert capsys.readouterr().out == said.out
    assert all(path.stat().st_mtime_ns == before for path, before in stopped.items()), "finished runs stay"
    whole = play_demo(scenes[1:], tmp_path / "whole", quiet=True)
    assert whole["dynafed"] == results["dynafed"], "as without the interruption"


def test_scenes_are_chosen_by_method(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    played: list[Any] = []
    monkeypatch.setattr(
        "fedloom.cli.demo.play.play_demo", lambda scenes, out, quiet: played.append((scenes, out, quiet))
    )
    for words in (["demo"], ["demo", "lss", "fedmr", "fedcross", "--out", "there", "-q"]):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)
    assert played == [(list(DEMO_SCENES), None, False), ([DEMO_SCENES[0], DEMO_SCENES[2]], Path("there"), True)]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["demo", "fedcros"])
    assert capsys.readouterr().err == "fedloom: unknown scene 'fedcros'; did you mean 'fedcross'?\n"


def test_the_time_left_is_that_of_all_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("fedloom.cli.demo.progress.time.monotonic", lambda: clock)
    settings = {"lr": 0.01, "rounds": 10}
    scenes = [DemoScene("", (), {"fedavg": 10.0, "fedavg:lr=0.1": 20.0}, settings, seeds=2)] * 2
    progress = DemoProgress(scenes, quiet=True)

    def begin(scene: int, seed: int, label: str, history: list[dict[str, Any]]) -> None:
        progress.start_scene(scene)
        progress.on_run_start(Path("run"), make_config({"rounds": 10, "seed": seed, "variant": label}), history)

    begin(0, 0, "fedavg", [])
    assert progress.time_left() == 120, "as planned"
    for at in range(10):
        clock += 2  # twice as long as planned
        progress.on_round_end({"round": at + 1})
    progress.on_run_end()
    assert progress.time_left() == pytest.approx(2 * 110)
    begin(1, 1, "fedavg:lr=0.1", [{"round": at} for at in range(6)])  # what lies between was found on the disk
    assert progress.time_left() == pytest.approx(2 * 10)
    for at in range(5, 10):
        clock += 2
        progress.on_round_end({"round": at + 1})
    progress.on_run_end()
    assert progress.time_left() == 0


# the demo that the documentation shows


@pytest.mark.parametrize("name", ["demo", "demo-settled"])
def test_the_saved_output_follows_from_the_saved_results(name: str) -> None:
    saved = json.loads((ROOT / "results" / f"{name}.json").read_text())
    said = " ".join(" ".join(saved["output"]).split())
    first = 0 if name == "demo" else 10
    for scene in DEMO_SCENES:
        shown = replace(scene, settings={**scene.settings, "seed": first} if first else scene.settings)
        results = {
            row: {
                int(seed): SeedResult(**{**found, "by_round": by_number(found["by_round"])})
                for seed, found in runs.items()
            }
            for row, runs in saved["results"][scene.folder].items()
        }
        assert [list(runs) for runs in results.values()] == [list(range(first, first + scene.seeds))] * len(scene.rows)
        for words in shown.commands():
            assert format_demo_command(words).splitlines()[0] in saved["output"]
            assert " ".join(words) in said.replace(" \\ ", " ")
        for claim in scene.claims:
            assert judge_demo_claim(shown, claim, results) in said


def by_number(values: dict[str, float]) -> dict[int, float]:
    return {int(round): value for round, value in values.items()}


def test_the_page_shows_the_saved_output() -> None:
    saved = json.loads((ROOT / "results" / "demo.json").read_text())
    assert "\n".join(saved["output"]) in (ROOT / "docs" / "demo.md").read_text()
