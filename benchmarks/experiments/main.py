"""Run experiments of the papers on a GPU, one by one, within a time limit.

    FEDLOOM_DATA=DIR python -m benchmarks experiments cifar10-lenet --minutes 60

benchmarks/experiments/experiments.toml lists the experiments. Each is a comparison (`fedloom compare`) whose runs share
the GPU. The benchmark writes accuracy curves and the paper's numbers into small JSON files, also during the runs. At
the time limit it stops the runs, and the same command continues them later. `--tiny` tries all experiments on a CPU,
with two rounds of a few steps on two classes; its figures mean nothing.

An experiment with `after` starts from the last rounds of another experiment's runs instead of repeating them. The two
differ only in later rounds, for example in FedCDA's selection after the warm-up.
"""

import hashlib
import json
import shutil
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import fedloom
from benchmarks._common import command_of, make_parser
from benchmarks.experiments.curves import collect_runs
from fedloom.config import replace_config
from fedloom.errors import FedloomError, InputError, RunStopped
from fedloom.runs.callback import Callback
from fedloom.runs.directory import RunDirectory, is_run_directory
from fedloom.runs.resolve import resolve_method

LIST = Path(__file__).with_name("experiments.toml")
REFRESH = 30.0
"""Seconds between two updates of the results."""
LEAST = 40.0
"""Seconds that must be left to start an experiment."""
_writing = Lock()


def listed() -> list[dict[str, Any]]:
    """Return the experiments. One that is `like` another inherits the entries that it does not set."""
    found: dict[str, dict[str, Any]] = {}
    for own in tomllib.loads(LIST.read_text())["experiment"]:
        other = found[own["like"]] if "like" in own else {}
        settings = {**other.get("settings", {}), **own.get("settings", {})}
        found[own["name"]] = {**other, "options": {}, **own, "settings": settings}
    return list(found.values())


class ResultFile:
    """The results of one experiment, in a file that several experiments may share."""

    def __init__(self, experiment: Mapping[str, Any], runs: Path, results: Path, command: str) -> None:
        self._experiment, self._runs, self._command = experiment, runs, command
        self.start: dict[str, float] = {}
        """Figures of the start model."""
        self._path = results / f"{experiment['file']}.json"
        self._began = time.monotonic()
        first = experiment["settings"].get("seed", 0)
        seeds = range(first, first + experiment["seeds"])
        self._names = {f"{name}-seed{seed}" for name in experiment["methods"] for seed in seeds}
        continued = any((runs / name).exists() for name in self._names)  # otherwise the entry is of other runs
        self._before = self._entries().get(experiment["name"], {}).get("seconds", 0.0) if continued else 0.0

    def _entries(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return found

    def write(self, ended: str) -> None:
        """Update the entry; `ended` says how the experiment ended."""
        found = collect_runs(self._runs, self._names)  # the folder may hold runs of another experiment
        if not found:
            return
        entry = {
            "paper": self._experiment["paper"],
            "command": self._command,
            "ended": ended,
            "seconds": round(self._before + time.monotonic() - self._began, 1),
            "runs at once": self._experiment["concurrent_runs"],
            **self.start,
            **found,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _writing:
            entries = {**self._entries(), self._experiment["name"]: entry}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(entries, indent=1) + "\n")
            part.replace(self._path)


class Deadline(Callback):
    """Stops runs at the time limit, and updates the results."""

    def __init__(self, end: float, results: ResultFile) -> None:
        self._end, self._results, self._written = end, results, time.monotonic()

    def on_message(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self._written > REFRESH:
            self._written = time.monotonic()
            self._results.write("still running")

    def should_stop(self) -> bool:
        return time.monotonic() > self._end


def tiny(experiment: dict[str, Any]) -> dict[str, Any]:
    """Return the experiment in its smallest size, on the CPU."""
    settings = {
        **experiment["settings"],
        "rounds": 2, "steps": 2, "batch_size": 4, "eval_every": 1, "classes": "0-1", "device": "cpu",
        "precision": "fp32", "engine": "sequential",
    }  # fmt: skip
    if "after" in experiment:
        settings["rounds"] = 4
    settings["clients"], settings["clients_per_round"] = (
        min(settings["clients"], 10),
        min(settings["clients_per_round"], 3),
    )
    settings["model"] = small_model(settings["model"])
    if settings["partition"].startswith("dirichlet-blocks"):  # hardly splits two classes into equal clients
        settings["partition"] = "dirichlet:0.5"
    few: dict[str, dict[str, Any]] = {
        "dynafed": {
            "iterations": 1,
            "images_per_class": 1,
            "L": 2,
            "s": 1,
            "inner_steps": 2,
            "refine_at_synthesis": True,
        }
    }
    given = experiment.get("options", {})
    warm = given.get("fedcda", {}).get("warmup", 0) >= experiment["settings"]["rounds"]
    few |= {"fedcda": {"warmup": settings["rounds"] if warm else settings["rounds"] // 2}}
    few |= {"soups": {"epochs": None}, "diwa": {"epochs": None}}
    options = {
        name: {**given.get(name, {}), **few.get(name, {})} for name in {*given, *few} & set(experiment["methods"])
    }
    made = {**experiment, "settings": settings, "options": options, "seeds": 1, "concurrent_runs": 1}
    if "start" in experiment:
        before = experiment["start"]
        made["start"] = {
            **before,
            "model": small_model(before["model"]),
            "rounds": 1,
            "classes": "0-1",
            "device": "cpu",
            "batch_size": 500,
        }
        settings["new_head"] = True
    return made


def alone(experiment: dict[str, Any], method: str) -> dict[str, Any]:
    """Return an experiment with the first run of one method alone, to time it.

    It uses the folder of the whole experiment, which therefore does not repeat the run.
    """
    name = experiment["name"]
    if method not in experiment["methods"]:
        raise InputError(f"This experiment has no method {method!r}; it has {', '.join(experiment['methods'])}.")
    named = {"name": f"{name}, {method} alone", "folder": name, "methods": [method]}
    options = {key: value for key, value in experiment["options"].items() if key == method}
    return {**experiment, **named, "options": options, "seeds": 1, "concurrent_runs": 1}


def small_model(model: str) -> str:
    """Return a LeNet with the same options."""
    _, colon, options = model.partition(":")
    return f"lenet{colon}{options}"


def folder_of(name: str, runs: Path) -> Path:
    """Return the folder of an experiment's runs."""
    return runs / name.replace(", ", "-").replace(" ", "-")


def begin_after(experiment: Mapping[str, Any], before: Path, folder: Path) -> None:
    """Copy the finished runs of another experiment, with the rounds and options of this one.

    This is correct only if the new options change nothing in the copied rounds; a test compares with complete runs.
    """
    for finished in sorted(before.glob("*-seed*")):
        target, source = folder / finished.name, RunDirectory.open(finished)
        if source.summary() is None:
            raise InputError(f"{finished} has not finished, so no run can continue it.")
        if is_run_directory(target):
            continue
        config = replace_config(source.config, rounds=experiment["settings"]["rounds"], options=experiment["options"])
        config = replace_config(config, options=resolve_method(config).resolved_options())
        part = target.with_name(f".{target.name}")
        shutil.rmtree(part, ignore_errors=True)  # of an interrupted copy
        inputs = source.inputs()
        RunDirectory.create(
            part, config, data_hashes=inputs["data"], machine=inputs["machines"][-1], cache_dir=source.cache_dir
        )
        own = shutil.ignore_patterns("config.toml", "inputs.json", "summary.json", "model.safetensors", "report.html")
        shutil.copytree(finished, part, ignore=own, dirs_exist_ok=True)
        part.rename(target)


def train_start(settings: Mapping[str, Any], runs: Path, deadline: Deadline) -> fedloom.RunResult:
    """Train a start model on all samples in one place, or continue; experiments with the same settings share it."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    folder = runs / f"start-{digest}"
    if is_run_directory(folder):
        return fedloom.resume(folder, callbacks=[deadline], report=False)
    return fedloom.run("centralized", out=folder, callbacks=[deadline], report=False, **settings)


def run_or_resume(experiment: Mapping[str, Any], end: float, runs: Path, results: Path, command: str) -> str:
    """Run or continue one experiment; return how it ended."""
    folder = folder_of(experiment.get("folder", experiment["name"]), runs)
    file = ResultFile(experiment, folder, results, command)
    deadline = Deadline(end, file)
    settings = {"device": "cuda", **experiment["settings"]}
    try:
        if "start" in experiment:
            start = train_start({"device": "cuda", **experiment["start"]}, runs, deadline)
            settings["init"] = str(start.path)
            file.start = {"accuracy of the start, on its own test samples": start.last_accuracy or 0.0}
            print(f"  start: accuracy {start.last_accuracy:.4f}", flush=True)
        if "after" in experiment:
            begin_after(experiment, folder_of(experiment["after"], runs), folder)
        found = fedloom.compare(
            experiment["methods"], experiment["seeds"], options=experiment.get("options"), out=folder,
            concurrent_runs=experiment["concurrent_runs"], callbacks=[deadline], report=False, **settings,
        )  # fmt: skip
    except RunStopped:
        file.write("stopped at the time limit; the same command continues")
        return "stopped"
    except InputError:
        raise
    except FedloomError as error:
        file.write(f"failed: {error}")
        return f"failed: {error}"
    file.write("finished")
    for run in found.runs:
        print(f"  {run.path.name}: {run.summary['accuracy']:.4f}, last {run.last_accuracy:.4f}", flush=True)
    return "finished"


def main(arguments: Sequence[str]) -> None:
    known = listed()
    parser = make_parser("experiments", __doc__)
    names = "; ".join(experiment["name"] for experiment in known)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"experiments to run; default: all of {names}")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit")
    parser.add_argument("--seeds", type=int, help="number of seeds; default: that of the experiment")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results files")
    parser.add_argument("--together", action="store_true", help="run all experiments at the same time")
    parser.add_argument("--alone", metavar="METHOD", help="run only the first run of this method, to time it")
    parser.add_argument("--tiny", action="store_true", help="use the smallest sizes on the CPU, to try the experiments")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {e["name"] for e in known}
    if unknown:
        parser.error(f"there is no experiment {min(unknown)!r}; the experiments are {names}")
    end = time.monotonic() + 60 * options.minutes
    command = command_of("experiments", arguments)
    named = {*options.names, *(e["after"] for e in known if e["name"] in options.names and "after" in e)}
    chosen = [experiment for experiment in known if not named or experiment["name"] in named]

    def run_one(experiment: dict[str, Any]) -> None:
        left = end - time.monotonic()
        if left < LEAST:
            print(f"{experiment['name']}: no time left", flush=True)
            return
        if options.seeds:
            experiment["seeds"] = options.seeds
        experiment["settings"]["seed"] = options.seed
        print(f"{experiment['name']}, {left / 60:.1f} minutes left", flush=True)
        began = time.monotonic()
        try:
            if options.alone:
                experiment = alone(experiment, options.alone)
            experiment = tiny(experiment) if options.tiny else experiment
            ended = run_or_resume(experiment, end, options.runs, options.results, command)
        except InputError as error:  # for example missing data; other experiments may have theirs
            ended = str(error)
        print(f"{experiment['name']}: {ended}, {time.monotonic() - began:.0f} s", flush=True)

    for later in (False, True):
        some = [experiment for experiment in chosen if ("after" in experiment) is later]
        with ThreadPoolExecutor(max(1, len(some)) if options.together else 1) as pool:
            list(pool.map(run_one, some))
