"""Whole experiments of the papers on a GPU, one after the other as far as the time goes.

    FEDLOOM_DATA=DIR python benchmarks/experiments.py [NAMES] [--minutes 9] [--together] [--alone METHOD] [--seed 0] \
        [--seeds 2] [--runs DIR] [--results DIR]

They are listed in benchmarks/experiments.toml, the most telling first. Each is a comparison (`fedloom compare`) whose
runs share the GPU; accuracy curves go into small JSON files, refreshed while runs are under way, with the paper's
numbers beside them. What did not fit is stopped in time, and the same command goes on with it. `--tiny` tries all of
them out on the CPU, with two rounds of a few steps on two classes; its figures mean nothing.

An experiment that comes `after` another begins with the rounds of that one's runs instead of playing them again: for
runs that only differ in what happens later, such as in how FedCDA chooses after its warm-up.
"""

import argparse
import hashlib
import json
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from curves import collected

import fedloom
from fedloom.config import replace_config
from fedloom.errors import FedloomError, InputError, RunStopped
from fedloom.runs.callback import SilentCallback
from fedloom.runs.directory import RunDirectory, is_run_directory
from fedloom.runs.pretrain import pretrain
from fedloom.runs.resolve import resolve_method

LIST = Path(__file__).with_name("experiments.toml")
REFRESH = 30.0
"""Seconds between two writings of results while runs are under way."""
LEAST = 40.0
"""Seconds below which nothing new is begun."""
_writing = Lock()


def listed() -> list[dict[str, Any]]:
    """The experiments. One that is `like` another has its entries, but for those of its own."""
    found: dict[str, dict[str, Any]] = {}
    for own in tomllib.loads(LIST.read_text())["experiment"]:
        other = found[own["like"]] if "like" in own else {}
        settings = {**other.get("settings", {}), **own.get("settings", {})}
        found[own["name"]] = {**other, "options": {}, **own, "settings": settings}
    return list(found.values())


class Page:
    """The results of one experiment, in a file that it may share with others."""

    def __init__(self, experiment: Mapping[str, Any], runs: Path, results: Path) -> None:
        self._experiment, self._runs = experiment, runs
        self.start: dict[str, float] = {}
        """What is known of the pretrained model that runs begin with."""
        self._path = results / f"{experiment['file']}.json"
        self._began = time.monotonic()
        first = experiment["settings"].get("seed", 0)
        seeds = range(first, first + experiment["seeds"])
        self._names = {f"{name}-seed{seed}" for name in experiment["methods"] for seed in seeds}
        goes_on = any((runs / name).exists() for name in self._names)  # if not, what is written is of other runs
        self._before = self._entries().get(experiment["name"], {}).get("seconds", 0.0) if goes_on else 0.0

    def _entries(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return found

    def write(self, ended: str) -> None:
        found = collected(self._runs, self._names)  # it may share its folder, with a run that is timed alone
        if not found:
            return
        entry = {
            "paper": self._experiment["paper"],
            "command": " ".join(["python", *map(shlex.quote, sys.argv)]),
            "ended": ended,
            "seconds": round(self._before + time.monotonic() - self._began, 1),
            "runs at once": self._experiment["at_once"],
            **self.start,
            **found,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _writing:
            entries = {**self._entries(), self._experiment["name"]: entry}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(entries, indent=1) + "\n")
            part.replace(self._path)


class Deadline(SilentCallback):
    """Stops runs when the time is over, and has the results written now and then."""

    def __init__(self, end: float, page: Page) -> None:
        self._end, self._page, self._written = end, page, time.monotonic()

    def note(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def record(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self._written > REFRESH:
            self._written = time.monotonic()
            self._page.write("still running")

    def wants_stop(self) -> bool:
        return time.monotonic() > self._end


def tiny(experiment: dict[str, Any]) -> dict[str, Any]:
    """The same with as little work as there can be, on the CPU."""
    settings = {
        **experiment["settings"],
        "rounds": 2, "steps": 2, "batch_size": 4, "eval_every": 1, "classes": "0-1", "device": "cpu",
        "precision": "fp32", "engine": "plain",
    }  # fmt: skip
    if "after" in experiment:
        settings["rounds"] = 4
    settings["clients"], settings["per_round"] = min(settings["clients"], 10), min(settings["per_round"], 3)
    settings["model"] = small_one(settings["model"])
    if settings["partition"].startswith("dirichlet-blocks"):  # which can hardly cut two classes into equal clients
        settings["partition"] = "dirichlet:0.5"
    few: dict[str, dict[str, Any]] = {
        "dynafed": {"iterations": 1, "images_per_class": 1, "L": 2, "s": 1, "inner_steps": 2, "at_once": True}
    }
    given = experiment.get("options", {})
    warm = given.get("fedcda", {}).get("warmup", 0) >= experiment["settings"]["rounds"]
    few |= {"fedcda": {"warmup": settings["rounds"] if warm else settings["rounds"] // 2}}
    few |= {"soups": {"epochs": None}, "diwa": {"epochs": None}}
    options = {
        name: {**given.get(name, {}), **few.get(name, {})} for name in {*given, *few} & set(experiment["methods"])
    }
    made = {**experiment, "settings": settings, "options": options, "seeds": 1, "at_once": 1}
    if "pretrain" in experiment:
        before = experiment["pretrain"]
        made["pretrain"] = {
            **before,
            "model": small_one(before["model"]),
            "epochs": 1,
            "classes": "0-1",
            "device": "cpu",
            "batch_size": 500,
        }
        settings["new_head"] = True
    return made


def alone(experiment: dict[str, Any], method: str) -> dict[str, Any]:
    """A method's first run, with the GPU to itself: how long one takes. The whole experiment need not run it again."""
    name = experiment["name"]
    if method not in experiment["methods"]:
        raise InputError(f"it runs {', '.join(experiment['methods'])}, not {method!r}.")
    named = {"name": f"{name}, {method} alone", "folder": name, "methods": [method]}
    options = {key: value for key, value in experiment["options"].items() if key == method}
    return {**experiment, **named, "options": options, "seeds": 1, "at_once": 1}


def small_one(model: str) -> str:
    """A LeNet with the same kind of norm."""
    _, colon, options = model.partition(":")
    return f"lenet{colon}{options}"


def folder_of(name: str, runs: Path) -> Path:
    return runs / name.replace(", ", "-").replace(" ", "-")


def begin_after(experiment: Mapping[str, Any], before: Path, folder: Path) -> None:
    """Begin each run with what the run of the same name has played, under this experiment's rounds and options.

    That is right where these change nothing in the rounds before; a test compares with runs from the beginning.
    """
    for played in sorted(before.glob("*-seed*")):
        place, source = folder / played.name, RunDirectory.open(played)
        if source.summary() is None:
            raise InputError(f"{played} has not finished, and is to be gone on with.")
        if is_run_directory(place):
            continue
        config = replace_config(source.config, rounds=experiment["settings"]["rounds"], options=experiment["options"])
        config = replace_config(config, options=resolve_method(config).stated())
        part = place.with_name(f".{place.name}")
        shutil.rmtree(part, ignore_errors=True)  # of a copy that was broken off
        RunDirectory.create(part, config)
        own = shutil.ignore_patterns("config.toml", "summary.json", "model.safetensors", "report.html")
        shutil.copytree(played, part, ignore=own, dirs_exist_ok=True)
        part.rename(place)


def carry_out(experiment: Mapping[str, Any], end: float, runs: Path, results: Path) -> str:
    """Run one experiment, or go on with it; how it ended."""
    folder = folder_of(experiment.get("folder", experiment["name"]), runs)
    page = Page(experiment, folder, results)
    watcher = Deadline(end, page)
    settings = {"device": "cuda", **experiment["settings"]}
    try:
        if "pretrain" in experiment:
            given = {"device": "cuda", **experiment["pretrain"]}
            which = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
            start = pretrain(out=runs / f"start-{which}.safetensors", watcher=watcher, **given)
            settings["init"] = str(start.path)
            page.start = {"accuracy of the start, on its own test samples": start.accuracy}
            print(f"  pretrained: accuracy {start.accuracy:.4f}", flush=True)
        if "after" in experiment:
            begin_after(experiment, folder_of(experiment["after"], runs), folder)
        found = fedloom.compare(
            experiment["methods"], experiment["seeds"], options=experiment.get("options"), out=folder,
            at_once=experiment["at_once"], watcher=watcher, report=False, **settings,
        )  # fmt: skip
    except RunStopped:
        page.write("stopped when the time was over; the same command goes on with it")
        return "stopped"
    except InputError:
        raise
    except FedloomError as error:
        page.write(f"failed: {error}")
        return f"failed: {error}"
    page.write("finished")
    for run in found.runs:
        print(f"  {run.path.name}: {run.summary['accuracy']:.4f}", flush=True)
    return "finished"


def main() -> None:
    known = listed()
    parser = argparse.ArgumentParser(description="Whole experiments of the papers on a GPU.")
    parser.add_argument("names", nargs="*", help=f"some of: {'; '.join(e['name'] for e in known)}; by default all")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument("--seeds", type=int, help="how many, instead of the experiment's own number")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--together", action="store_true", help="all at the same time, where each has a GPU's part")
    parser.add_argument("--alone", metavar="METHOD", help="only its first run in each, with the GPU to itself")
    parser.add_argument("--tiny", action="store_true", help="to try them out")
    options = parser.parse_args()
    unknown = set(options.names) - {e["name"] for e in known}
    if unknown:
        parser.error(f"there is no experiment {min(unknown)!r}")
    end = time.monotonic() + 60 * options.minutes
    named = {*options.names, *(e["after"] for e in known if e["name"] in options.names and "after" in e)}
    chosen = [experiment for experiment in known if not named or experiment["name"] in named]

    def one(experiment: dict[str, Any]) -> None:
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
            ended = carry_out(tiny(experiment) if options.tiny else experiment, end, options.runs, options.results)
        except InputError as error:  # data that are not there, say: others may be
            ended = str(error)
        print(f"{experiment['name']}: {ended}, {time.monotonic() - began:.0f} s", flush=True)

    first, then = ([e for e in chosen if ("after" in e) is later] for later in (False, True))
    for some in (first, then):
        with ThreadPoolExecutor(max(1, len(some)) if options.together else 1) as pool:
            list(pool.map(one, some))


if __name__ == "__main__":
    main()
