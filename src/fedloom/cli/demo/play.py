"""Play the scenes of the demo, judge the claims, and write one report."""

import shlex
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.cli.demo.progress import DemoProgress
from fedloom.cli.demo.scene import START_METHOD, WIDTH, DemoScene, format_demo_command
from fedloom.cli.demo.verdicts import SceneResults, SeedResult, judge_demo_claim
from fedloom.cli.interrupts import StopOnSignal
from fedloom.cli.output import print_table
from fedloom.errors import RunStopped
from fedloom.report import read_run_record, write_report_page
from fedloom.runs.callback import Callback
from fedloom.runs.compare import ComparisonResult, compare
from fedloom.runs.directory import claim_directory, is_run_directory
from fedloom.runs.execute import resume, run
from fedloom.runs.result import RunResult
from fedloom.utils.result_window import compute_window_std, select_window_values

TITLE = "Five papers put to the test"

NEXT = (
    ("fedloom list methods", "all methods and their options"),
    ("fedloom compare fedavg fedprox scaffold --data hard-digits --seeds 3", "a comparison of your own"),
    ("fedloom run fedavg --data mine.csv,label=income", "your own data"),
)


def play_demo(scenes: Sequence[DemoScene], out: Path | None = None, quiet: bool = False) -> dict[str, SceneResults]:
    """Play the scenes one after the other, and return the results of each by the name of its folder.

    Runs that `out` holds already are not run again.
    """
    stop_on_signal, progress = StopOnSignal(), DemoProgress(scenes, quiet)
    results = {}
    with (
        claim_directory(out or Path("runs", "demo"), numbered=out is None) as folder,
        _stoppable(scenes, folder, progress),
    ):
        print("Accuracy on test data, in percent. Brackets: 95 % intervals of differences, paired by seed.")
        found = []
        for number, scene in enumerate(scenes):
            progress.start_scene(number)
            print(f"\n{number + 1}. {scene.title}\n")
            for claim in scene.claims:
                print(_wrap(f"{claim.paper}: {claim.text}"))
            print()
            for words in scene.commands():
                print(format_demo_command(words))
            compared = _play_scene(scene, folder, [stop_on_signal, progress])
            progress.end_scene()
            results[scene.folder] = _read_results(compared.runs)
            found += [read_run_record(run.path) for run in compared.runs]
            print()
            print_table(*compared.table.table("brief"))
            for claim in scene.claims:
                print(f"\n{_wrap(judge_demo_claim(scene, claim, results[scene.folder]))}")
        write_report_page(found, folder / "report.html", title=TITLE)
        print(f"\nreport: {folder / 'report.html'}\n\nTry next:")
        width = max(len(command) for command, _ in NEXT)
        for command, what in NEXT:
            print(f"  {command:<{width}}  {what}")
    return results


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _play_scene(scene: DemoScene, folder: Path, callbacks: Sequence[Callback]) -> ComparisonResult:
    """Run what the commands of the scene run, without a report of each run."""
    start: dict[str, Any] = {}
    if scene.start:
        out = folder / scene.start.folder
        if is_run_directory(out):
            resume(out, callbacks=callbacks, report=False)
        else:
            run(START_METHOD, out=out, callbacks=callbacks, report=False, **scene.start.settings)
        start = {"init": str(out), "new_head": True}
    return compare(
        list(scene.rows),
        scene.seeds,
        options=scene.options,
        out=folder / scene.folder,
        report=False,
        callbacks=callbacks,
        **scene.settings,
        **start,
    )


def _read_results(runs: Sequence[RunResult]) -> SceneResults:
    """Return the results of the runs by row and seed, in percent."""
    results: dict[str, dict[int, SeedResult]] = {}
    for result in runs:
        values = select_window_values(result.history, "accuracy", result.config.result_window)
        window = [100 * value for value in values]
        by_round = {record["round"]: 100 * record["accuracy"] for record in result.history if "accuracy" in record}
        found = SeedResult(statistics.fmean(window), compute_window_std(window) or 0.0, by_round)
        results.setdefault(result.config.label, {})[result.config.seed] = found
    return results


@contextmanager
def _stoppable(scenes: Sequence[DemoScene], folder: Path, progress: DemoProgress) -> Iterator[None]:
    """Say how to continue after Ctrl-C. Finished runs stay in the folder."""
    words = ["fedloom", "demo", *(name for scene in scenes for name in scene.names), "--out", str(folder)]
    try:
        yield
    except (RunStopped, KeyboardInterrupt):
        raise RunStopped(f"stopped; continue with: {shlex.join(words)}") from None
    finally:
        progress.end_scene()
